"""Names that programs import from DeepSpeed, other than the engine."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.git_version_info import torch_info
from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.op_builder import CPUAdamBuilder, QuantizerBuilder
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.topology import _prime_factors
from deepspeed.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config
from deepspeed.runtime.utils import call_to_str, partition_balanced, partition_uniform, prefix_sum_inc
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import zero_wrapper_for_fp_tensor_constructor
from deepspeed.utils import (
    get_z3_leaf_modules,
    groups,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from deepspeed.utils.nvtx import instrument_w_nvtx
from deepspeed.utils.timer import ThroughputTimer
from deepspeed.utils.zero_to_fp32 import get_optim_files
from megatron_core.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    "path",
    (
        "compression.init_compression",
        "runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
        "runtime.comm.coalesced_collectives.all_to_all_quant_reduce",
        "runtime.fp16.onebit.lamb.OnebitLamb",
        "runtime.zero.TiledLinearReturnBias",
        "runtime.zero.partition_parameters.MultipleAllGatherHandles",
    ),
)
def test_refused_classes_say_what_to_use(path: str) -> None:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(f"deepspeed.{module}"), name)
    with pytest.raises(ConfigError, match=rf"{name} is not available in megatron_core.drop_in: .*(use|set) "):
        kind(3, hidden_size=4)


@pytest.mark.parametrize("splits", [(1, 1), (3, 2), (5, 7)])
def test_tiles_equal_a_linear_layer(splits: tuple[int, int]) -> None:
    linear = torch.nn.Linear(5, 7, dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64)
    arguments: dict[str, Any] = {
        "in_splits": splits[0],
        "out_splits": splits[1],
        "init_linear": linear,
        "dtype": x.dtype,
    }
    tiles = deepspeed.zero.TiledLinear(5, 7, **arguments)
    torch.testing.assert_close(tiles(x), linear(x))
    weights = [torch.cat([tile.weight for tile in row], 1) for row in tiles.linears]
    torch.testing.assert_close(torch.cat(weights), linear.weight)
    with pytest.raises(RuntimeError, match="in_splits=6 must be from 1 to in_features=5"):
        deepspeed.zero.TiledLinear(5, 7, in_splits=6)


def test_builders_say_what_is_available() -> None:
    assert deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME]
    assert not deepspeed.ops.__compatible_ops__[QuantizerBuilder.NAME]
    assert (CPUAdamBuilder.installed_rocm_version() == [0, 0]) == (torch.version.hip is None)
    with pytest.raises(ConfigError, match="use the optimizers of"):
        CPUAdamBuilder().load()
    assert torch.__version__.startswith(torch_info["version"])


@pytest.mark.parametrize(
    ("given", "name", "value"),
    (
        ({}, "overlap_comm", False),
        ({"stage": 3}, "overlap_comm", True),
        ({"stage3_prefetch_bucket_size": 7}, "prefetch_bucket_size", 7),
        ({"stage3_gather_fp16_weights_on_model_save": True}, "gather_16bit_weights_on_model_save", True),
    ),
)
def test_section_of_zero(given: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(DeepSpeedZeroConfig(**given), name) == value


def _read(**section: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig({"train_batch_size": 1, **section})


def test_sections_inside_of_sections() -> None:
    found = DeepSpeedZeroConfig(offload_optimizer={"pipeline_read": True}, cpu_offload_param=True)
    assert found.offload_optimizer is not None and found.offload_optimizer.pipeline
    assert found.offload_param is not None and found.offload_param.device == "cpu"
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: DeepSpeedZeroConfig(stage=4), "stage\n  Input should be 0, 1, 2"),
        (lambda: DeepSpeedZeroConfig(stages=1), "stages\n  Extra inputs are not permitted"),
        (lambda: DeepSpeedFP16Config(loss_scale=float("nan")), "should be a finite number"),
        (lambda: DeepSpeedFP16Config(enabled=True, loss_scale_window=0), "must be an integer >= 1"),
        (lambda: _read(flops_profiler={"profile_step": "x"}), "flops_profiler.profile_step='x': Input should be"),
        (lambda: _read(tensorboard={"job_name": 3}), "tensorboard.job_name=3: Input should be a valid string"),
        (lambda: _read(zero_optimization={"sub_group_size": -1}), "zero_optimization.sub_group_size=-1: Input"),
    ),
)
def test_wrong_sections(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_parts_of_lists() -> None:
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert partition_balanced([1, 1, 1, 3], 2) == [0, 3, 4]
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert call_to_str("step", 1, rate="high") == "step(1, rate='high')"


def test_factors_and_ranks_of_experts() -> None:
    assert [_prime_factors(number) for number in (1, 7, 12)] == [[], [7], [2, 2, 3]]
    with pytest.raises(ValueError, match="N=0"):
        _prime_factors(0)
    sharing, copies = groups._get_expert_parallel_ranks(8, tensor_parallel_size_=2, expert_parallel_size_=2)
    assert sharing == [[0, 2], [4, 6], [1, 3], [5, 7]] and copies == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_files_of_optimizers_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2, 10)]
    for name in (*reversed(names), "mp_rank_00_model_states.pt"):
        (tmp_path / name).touch()
    assert get_optim_files(tmp_path) == [str(tmp_path / name) for name in names]
    with pytest.raises(CheckpointError, match="optim_states"):
        get_optim_files(tmp_path / "other")


def test_leaf_modules_by_name() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Sequential(nn.Linear(2, 2))})
    assert set_z3_leaf_modules_by_name(model, ["first"]) == ([model["first"]], [])
    assert set_z3_leaf_modules_by_suffix(model, [".0", "third"], raise_if_not_found=False)[1] == ["third"]
    assert get_z3_leaf_modules(model) == [model["first"], model["second"][0]]
    assert len(set_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"])) == 2
    with pytest.raises(ValueError, match="third"):
        set_z3_leaf_modules_by_name(model, ["third"])


def test_a_model_without_experts() -> None:
    model = nn.Linear(2, 2)
    group = {"params": list(model.parameters())}
    assert has_moe_layers(model) == (False, 0)
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]


def test_a_range_in_a_trace_keeps_the_function() -> None:
    @instrument_w_nvtx
    def twice(value: int) -> int:
        """Return 2 * value."""
        return 2 * value

    assert twice(4) == 8 and twice.__name__ == "twice"


@pytest.mark.parametrize(
    ("stage", "old", "new"), ((2, "cpu_offload", "offload_optimizer"), (3, "cpu_offload_param", "offload_param"))
)
def test_old_names_of_offload(stage: int, old: str, new: str) -> None:
    found = [
        DeepSpeedConfig({"train_batch_size": 2, "zero_optimization": {"stage": stage, **section}})
        for section in ({old: True}, {new: {"device": "cpu"}})
    ]
    assert found[0].translation.settings == found[1].translation.settings
    assert getattr(found[0].zero_config, new).device == "cpu"
    assert getattr(DeepSpeedConfig({"train_batch_size": 2}).zero_config, new) is None


def test_attributes_of_nested_modules() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.Tanh())
    assert recursive_getattr(model, "0.0.weight") is model[0][0].weight
    for name in ("0.0", "1"):
        recursive_setattr(model, name, nn.ReLU())
    assert isinstance(model[0][0], nn.ReLU) and isinstance(model[1], nn.ReLU)


def test_constructors_with_a_dtype_and_a_device() -> None:
    arange = zero_wrapper_for_fp_tensor_constructor(torch.arange, torch.bfloat16, torch.device("meta"))
    assert arange(3.0).dtype == torch.bfloat16 and arange(3.0).is_meta
    assert arange(3, device="cpu").tolist() == [0, 1, 2]


def test_a_timer_counts_epochs_and_samples() -> None:
    timer = ThroughputTimer(batch_size=4, start_step=1, synchronizes=False)
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(3):
        timer.start()
        timer.stop(global_step=True)
    timer.update_epoch_count()
    assert timer.epoch_count == 1 and timer.avg_samples_per_sec() > 0


@pytest.mark.parametrize(
    ("kind", "params", "momenta"),
    (
        ("SGD", {"momentum": 0.9}, 0.9),
        ("Lion", {"betas": (0.8, 0.9)}, (0.8, 0.9)),
        ("Lamb", {}, (0.9, 0.999)),
        ("Adagrad", {}, 0.0),
    ),
)
def test_names_and_momenta_of_optimizers(kind: str, params: dict[str, Any], momenta: Any) -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]
    assert engine.get_mom() == [momenta]
    assert engine.optimizer_name() == (kind if kind == "SGD" else kind.lower())


def test_the_accelerator_has_tensors_generators_and_builders() -> None:
    accelerator = deepspeed.get_accelerator()
    assert torch.equal(accelerator.LongTensor([3]), torch.tensor([3]))
    assert accelerator.default_generator(0) is torch.default_generator
    assert accelerator.initial_seed() == torch.initial_seed()
    assert accelerator.lazy_call(lambda: 7) == 7
    assert accelerator.get_op_builder("CPUAdamBuilder") is CPUAdamBuilder
    assert accelerator.get_op_builder("FlashAttentionBuilder") is None
    assert not import_module("deepspeed.ops.op_builder.builder").OpBuilder.is_rocm_pytorch()
    assert import_module("deepspeed.utils.timer").BACKWARD_INNER_MICRO_TIMER == "bwd_inner_microstep"
    assert import_module("deepspeed.checkpoint").PADDED_VOCAB_SIZE == "padded_vocab_size"
