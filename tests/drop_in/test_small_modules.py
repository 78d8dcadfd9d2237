"""Small modules for Megatron Core's users."""

from __future__ import annotations

import json
import logging
import math
import pickle
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megatron.core import Timers, mpu
from megatron.core import num_microbatches_calculator as micro_batches
from megatron.core._rank_utils import log_single_rank
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.indexed_dataset import _IndexReader as IndexReader
from megatron.core.enums import Fp8Recipe, LayerType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import (
    bias_swiglu_impl,
    weighted_bias_swiglu_impl,
    weighted_squared_relu_impl,
)
from megatron.core.fusions.fused_indices_converter import fused_indices_to_multihot
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode
from megatron.core.inference.inference_request import Status
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import device_memory_summary
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, combine_param_group_overrides
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.utils import gather_split_1d_tensor
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_model_config,
    is_torch_min_version,
    local_multi_tensor_scale,
    log_on_each_pipeline_stage,
    unwrap_model,
)
from megatron.training.config import PretrainConfigContainer, TokenizerConfig
from megatron.training.utils import get_blend_and_blend_per_split
from megatron_core.errors import ConfigError, DataError, LayoutError
from megatron_core.parallel.groups import LocalGroup
from megatron_core.verify.ranks import run_ranks


def test_errors_are_of_the_kinds_that_megatrons_users_catch() -> None:
    for kind in (ConfigError, DataError, LayoutError):
        assert issubclass(kind, ValueError)
        assert issubclass(kind, AssertionError)
    assert issubclass(LayoutError, RuntimeError)


def test_micro_batches_of_a_step() -> None:
    micro_batches.destroy_num_microbatches_calculator()
    sizes = {"rank": 0, "micro_batch_size": 2, "data_parallel_size": 3}
    micro_batches.init_num_microbatches_calculator(**sizes, global_batch_size=20, decrease_batch_size_if_needed=True)
    assert micro_batches.get_num_microbatches() == 3
    assert micro_batches.get_current_global_batch_size() == 20
    assert micro_batches.get_current_running_global_batch_size() == 18
    with pytest.raises(AssertionError, match="already"):
        micro_batches.init_num_microbatches_calculator(**sizes, global_batch_size=12)
    micro_batches.reconfigure_num_microbatches_calculator(
        **sizes, step_batch_size_schedule="0:6 1K:12 2K:13", seq_length=10
    )
    found = []
    for consumed in (0, 99, 100, 199):
        micro_batches.update_num_microbatches(consumed)
        found.append(micro_batches.get_num_microbatches())
    assert found == [1, 1, 2, 2]
    with pytest.raises(LayoutError, match="global_batch_size=13 is not a multiple"):
        micro_batches.update_num_microbatches(200)
    micro_batches.destroy_num_microbatches_calculator()
    with pytest.raises(ConfigError, match="init_num_microbatches_calculator"):
        micro_batches.get_num_microbatches()


@pytest.mark.parametrize("schedule", ["5:6", "0:6 x:7", "0:6 10:8 5:9", ""])
def test_schedules_of_batch_sizes_that_say_nothing(schedule: str) -> None:
    with pytest.raises(ConfigError, match="step_batch_size_schedule"):
        micro_batches.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 0, schedule)


def scheduler(**changes: Any) -> OptimizerParamScheduler:
    groups = [{"default_config": True}, {"max_lr": 0.4, "wd_mult": 0.0}]
    given = {"init_lr": 0.0, "max_lr": 0.2, "min_lr": 0.02, "lr_warmup_steps": 4, "lr_decay_steps": 12}
    given |= {"lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.3, "wd_incr_steps": 8}
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups), **given | {"wd_incr_style": "linear"} | changes
    )


def test_rates_of_parameter_groups() -> None:
    plan = scheduler()
    first, second = plan.optimizer.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.0, 0.1)
    plan.step(2)
    assert (first["lr"], second["lr"]) == (pytest.approx(0.1), pytest.approx(0.2))
    plan.step(6)
    assert first["lr"] == pytest.approx(0.02 + 0.5 * (1 + math.cos(math.pi / 2)) * 0.18)
    assert (first["weight_decay"], second["weight_decay"]) == (pytest.approx(0.3), 0.0)
    other = scheduler(max_lr=0.1)
    other.load_state_dict(plan.state_dict())
    assert (other.max_lr, other.optimizer.param_groups[0]["lr"]) == (0.2, first["lr"])
    strict = scheduler(max_lr=0.1, use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(RuntimeError, match=r"max_lr=0.1, but the checkpoint has 0.2"):
        strict.load_state_dict(plan.state_dict())
    assert combine_param_group_overrides([{"min_lr": 0.1}, None, {"wd_mult": 0.0}]) == {"min_lr": 0.1, "wd_mult": 0.0}
    with pytest.raises(ConfigError, match="two overrides of min_lr"):
        combine_param_group_overrides([{"min_lr": 0.1}, {"min_lr": 0.2}])


def test_a_scheduler_says_which_rule_is_broken() -> None:
    with pytest.raises(AssertionError, match="min_lr <= max_lr; 0 <= lr_warmup_steps"):
        scheduler(min_lr=0.5, lr_warmup_steps=12)


def test_specifications() -> None:
    spec = ModuleSpec(torch.nn.Linear, params={"in_features": 2, "out_features": 3})
    assert build_module(spec, bias=False).weight.shape == (3, 2)
    assert build_module(ModuleSpec(("megatron.core.transformer.identity_op", "IdentityOp")))(5, 6) == 5
    assert build_module(scheduler) is scheduler
    assert get_submodules(partial(dict, submodules=3)) == 3
    with pytest.raises(ImportError, match="Could not find spec 'x' in module 'math'"):
        build_module(ModuleSpec(("math", "x")))
    with pytest.raises(TypeError, match="when instantiating Linear"):
        build_module(ModuleSpec(torch.nn.Linear))


def test_assumed_sizes_come_before_those_of_groups() -> None:
    try:
        mpu.set_tensor_model_parallel_world_size(4)
        mpu.set_tensor_model_parallel_rank(2)
        mpu.set_pipeline_model_parallel_rank(0)
        assert (mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()) == (4, 2)
        assert mpu.is_pipeline_first_stage()
        mpu.set_tensor_model_parallel_rank(None)
        assert mpu.get_tensor_model_parallel_rank() == 0
    finally:
        mpu.destroy_model_parallel()
    assert mpu.get_tensor_model_parallel_world_size() == 1
    assert mpu._MODEL_PARALLEL_GROUP is None


def groups_of_four() -> tuple[Any, ...]:
    with pytest.raises(RuntimeError, match="cannot be divided"):
        mpu.initialize_model_parallel(3)
    with pytest.raises(ConfigError, match="use_sharp"):
        mpu.initialize_model_parallel(2, use_sharp=True)
    mpu.initialize_model_parallel(2, num_distributed_optimizer_instances=2)
    with pytest.raises(RuntimeError, match="cannot be divided"):  # sizes are checked before existing groups
        mpu.initialize_model_parallel(3)
    with pytest.raises(AssertionError, match="exist already"):
        mpu.initialize_model_parallel(2)
    pgs = ProcessGroupCollection.use_mpu_process_groups()
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    grid.create_pg("tp")
    flat = gather_split_1d_tensor(torch.full((2, 1), float(mpu.get_tensor_model_parallel_rank())))
    return (
        (pgs.tp.size(), pgs.dp.size(), pgs.pp.size(), pgs.intra_dp_cp.size(), pgs.inter_dist_opt.size()),
        grid.get_rank_enum("dp"),
        grid.get_rank_enum(["tp", "dp"]),
        grid.get_pg("tp").rank() == pgs.tp.rank(),
        flat.tolist(),
    )


def test_groups_as_one_object_and_as_a_grid() -> None:
    expected = (2, 2, 1, 1, 2), [[0, 2], [1, 3]], [[0, 1, 2, 3]], True, [0.0, 0.0, 1.0, 1.0]
    assert run_ranks(4, groups_of_four) == [expected] * 4
    empty = ProcessGroupCollection()
    assert (empty.tp, repr(empty)) == (None, "ProcessGroupCollection(empty)")
    levels = [LocalGroup(2, 0), LocalGroup(4, 1)]
    assert repr(ProcessGroupCollection(tp=levels[0], hcp=levels)) == "ProcessGroupCollection(tp(2), hcp([2, 4]))"
    with pytest.raises(AttributeError, match="no group 'xyz'"):
        _ = empty.xyz
    with pytest.raises(ConfigError, match="Unknown attribute: xyz"):
        ProcessGroupCollection(xyz=1)


def test_views_of_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    grid.register_view("expert", list(np.array([2, 2, 2])), ["ep", "edp", "pp"], shared_dims=["pp"])
    assert grid.get_rank_enum("ep", view="expert") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ConfigError, match="different membership"):
        grid.register_view("wrong", [2, 2, 2], ["pp", "edp", "ep"], shared_dims=["pp"])
    with pytest.raises(KeyError, match="hasn't been created"):
        grid.get_pg("tp")
    with pytest.raises(RuntimeError, match="over sized"):
        HyperCommGrid([4, 4], ["tp", "dp"])


def test_recomputation_sees_the_same_generators() -> None:
    model_parallel_cuda_manual_seed(3, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    tracker, masks = get_cuda_rng_tracker(), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            masks.append(torch.rand(4))
        masks.append(torch.rand(4))
        return x * masks[-1] * masks[-2]

    x = torch.ones(4, requires_grad=True)
    y = checkpoint(layer, False, x)
    with tracker.fork():
        after = torch.rand(4)
    y.sum().backward()
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[1], masks[3])
    torch.testing.assert_close(x.grad, masks[0] * masks[1])
    with tracker.fork():
        assert not torch.equal(torch.rand(4), after)
    assert set(tracker.get_states()) == {"data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"}


@pytest.mark.parametrize("training", [True, False])
def test_bias_dropout_add(training: bool) -> None:
    x, bias = torch.randn(5, 4, dtype=torch.bfloat16), torch.randn(4, dtype=torch.bfloat16)
    residual = torch.randn(5, 4)
    expected = residual + (x.float() + bias.float())
    out = get_bias_dropout_add(training, fused=True)((x, bias), residual, 0.0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected)


def test_activations_with_bias() -> None:
    x, bias = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    gate, value = (x + bias).chunk(2, -1)
    functional = torch.nn.functional
    torch.testing.assert_close(bias_swiglu_impl(x, bias), functional.silu(gate) * value)
    weights = torch.rand(3, 1)
    torch.testing.assert_close(weighted_bias_swiglu_impl(x, None, weights), bias_swiglu_impl(x, None) * weights)
    limited = functional.silu(gate.clamp(max=0.5)) * value.clamp(-0.5, 0.5)
    torch.testing.assert_close(bias_swiglu_impl(x, bias, clamp_value=0.5), limited)
    unbiased = bias_swiglu_impl(x, None, clamp_value=0.5) * weights
    torch.testing.assert_close(weighted_bias_swiglu_impl(x, None, weights, clamp_value=0.5), unbiased)
    with pytest.raises(ConfigError, match="clamp_value=0 must be > 0"):
        bias_swiglu_impl(x, bias, clamp_value=0)
    torch.testing.assert_close(bias_geglu_impl(x, bias), functional.gelu(gate, approximate="tanh") * value)
    torch.testing.assert_close(bias_gelu_impl(x, bias), functional.gelu(x + bias, approximate="tanh"))


def test_softmax_of_masked_scores() -> None:
    scores = torch.randn(2, 3, 4, 4)
    softmax = FusedScaleMaskSoftmax(
        False, False, AttnMaskType.causal, False, lambda s, m: s.masked_fill(m, -1e9), True, 0.5
    )
    seen = torch.ones(4, 4).tril()
    shown = (0.5 * scores).exp() * seen
    torch.testing.assert_close(softmax(scores, None), shown / shown.sum(-1, keepdim=True))
    offset = torch.tensor([0.0, 1.0, -1.0])
    total = shown.sum(-1, keepdim=True) + offset.exp()[None, :, None, None]
    torch.testing.assert_close(softmax(scores, None, offset), shown / total)
    with pytest.raises(AssertionError, match="needs a mask"):
        softmax(torch.randn(1, 1, 2, 4), None)


def test_token_files_take_what_numpy_takes(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(100), multimodal=True)
    builder.add_document(["1", "22", "3"], [2, 1])
    builder.add_document(torch.tensor([4, 5]), [2], modes=[1])
    assert (builder.sequence_lengths, builder.sequence_modes) == ([2, 1, 2], [0, 0, 1])
    with pytest.raises(ValueError, match="70000 does not fit uint16"):
        builder.add_document(["70000"], [1])
    builder.finalize(f"{prefix}.idx")
    data = IndexedDataset(prefix, multimodal=True)
    assert np.concatenate([tokens for tokens, _ in data]).tolist() == [1, 22, 3, 4, 5]
    assert data.index.sequence_lengths.tolist() == [2, 1, 2]
    reader = IndexReader(f"{prefix}.idx", True)
    assert (reader.sequence_count, reader.document_count) == (3, 3)


def test_tokenizers_of_megatrons_arguments(tmp_path: Path) -> None:
    args = Namespace(
        tokenizer_type="NullTokenizer", vocab_size=100, make_vocab_size_divisible_by=128, tensor_model_parallel_size=2
    )
    assert build_tokenizer(args).vocab_size == 100
    assert args.padded_vocab_size == 256
    with pytest.raises(ValueError, match="tokenizer_type Unknown is not supported"):
        build_tokenizer(Namespace(tokenizer_type="Unknown"))
    config = TokenizerConfig(
        tokenizer_type="NullTokenizer", vocab_size=9, pad_vocab_size=False, chat_template="{{ 1 }}"
    )
    plain = build_tokenizer(config)
    assert (plain.library, plain.chat_template, plain.vocab_size) == ("null-text", "{{ 1 }}", 9)
    assert plain.apply_chat_template([{"role": "user", "content": "2"}]) == [1]
    config.special_tokens, config.use_gigatoken = ["<a>"], True
    for refused in (lambda: build_tokenizer(config), lambda: PretrainConfigContainer(tokenizer=config).run_config()):
        with pytest.raises(ConfigError, match="TokenizerConfig: special_tokens, use_gigatoken is not supported"):
            refused()
    MegatronTokenizer.write_metadata(str(tmp_path), "byte-level")
    assert MegatronTokenizer.from_pretrained(str(tmp_path)).vocab_size == 257
    with pytest.raises(ValueError, match="already exists"):
        MegatronTokenizer.write_metadata(str(tmp_path), "byte-level")
    MegatronTokenizer.write_metadata(str(tmp_path), "byte-level", Namespace, "{{ messages }}", overwrite=True)
    assert json.loads((tmp_path / "tokenizer_metadata.json").read_text()) == {
        **{"library": "byte-level", "class_name": "Namespace", "class_path": "argparse"},
        "chat_template": "{{ messages }}",
    }
    assert MegatronTokenizer.from_pretrained(str(tmp_path)).chat_template == "{{ messages }}"


def test_messages_of_one_rank_are_not_prepared_if_their_level_is_off() -> None:
    logger = Mock(spec=logging.Logger)
    logger.isEnabledFor.return_value = False
    group = Mock()
    log_single_rank(logger, logging.DEBUG, "message")
    log_on_each_pipeline_stage(logger, logging.DEBUG, "message", tp_group=group, dp_cp_group=group)
    logger.log.assert_not_called()
    group.rank.assert_not_called()
    logger.isEnabledFor.return_value = True
    group.rank.side_effect = [0, 0, 0, 1]  # the first rank of a stage, and another one
    for _ in range(2):
        log_on_each_pipeline_stage(logger, logging.INFO, "%s", "x", tp_group=group, dp_cp_group=group)
    logger.log.assert_called_once_with(logging.INFO, "%s", "x")
    with pytest.raises(ValueError, match="provided or not provided together"):
        log_on_each_pipeline_stage(logger, logging.INFO, "message", tp_group=group)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"activation_func_clamp_value": 0.0}, "greater than zero"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset must be zero"),
        ({"use_te_activation_func": True}, "use_te_activation_func must be False"),
        ({"num_moe_experts": None}, "only supported with MoE"),
        ({"mtp_num_layers": 1, "mtp_hsm": True}, "mtp_hsm=True requires mtp_num_layers >= 2"),
    ],
)
def test_configurations_are_checked_as_in_megatron(settings: dict[str, Any], match: str) -> None:
    given = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 2}
    given |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    given["activation_func_clamp_value"] = 10.0
    TransformerConfig(**given)
    with pytest.raises(ValueError, match=match):
        TransformerConfig(**given | settings)


def test_choices_of_experts_as_masks() -> None:
    indices = torch.tensor([[2, -1, 0], [-1, -1, 3]], dtype=torch.int32)
    probs = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    chosen, spread = fused_indices_to_multihot(indices, probs, 4)
    assert chosen.tolist() == [[True, False, True, False], [False, False, False, True]]
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[0, 2], expected[0, 0], expected[1, 3] = probs[0, 0], probs[0, 2], probs[1, 2]
    assert torch.equal(spread, expected)
    factors = torch.rand(2, 4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((spread * factors).sum(), probs)
    assert torch.equal(gradient, torch.stack([factors[0, [2, 0, 0]], factors[1, [0, 0, 3]]]) * (indices >= 0))
    weighted = weighted_squared_relu_impl(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([[0.5], [2.0]]))
    assert weighted.tolist() == [[0.5, 0.0], [18.0, 32.0]]
    target = [torch.empty(2), torch.empty(1)]
    local_multi_tensor_scale(1, None, [[torch.tensor([1.0, 2.0]), torch.tensor([3.0])], target], 0.5)
    assert [each.tolist() for each in target] == [[0.5, 1.0], [1.5]]


def test_enumerations_have_megatrons_members() -> None:
    """``str`` is a base where Megatron compares members with text; a member can be pickled, as in its checkpoints."""
    assert Fp8Recipe.delayed == "delayed" and KVCacheManagementMode("offload") is KVCacheManagementMode.OFFLOAD
    assert [each.value for each in (LayerType.embedding, LayerType.mtp, AttnMaskType.no_mask)] == [1, 5, 3]
    assert [each.value for each in (Status.WAITING_IN_QUEUE, Status.FAILED)] == [1, 5]
    for member in (Fp8Recipe.mxfp8, AttnMaskType.causal, KVCacheManagementMode.PERSIST, Status.COMPLETED):
        assert pickle.loads(pickle.dumps(member)) is member
    settings = InferenceConfig(128, 2.0, max_requests=3, ep_consensus_interval=4)
    assert (settings.block_size_tokens, settings.buffer_size_gb, settings.ep_consensus_interval) == (128, 2.0, 4)
    assert settings.kv_cache_management_mode is KVCacheManagementMode.PERSIST and settings.num_cuda_graphs is None
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="integer greater than or equal to 1"):
            SamplingParams(streaming_interval=wrong)  # type: ignore[arg-type]


def test_blends_of_megatrons_arguments(tmp_path: Path) -> None:
    names = "data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path"
    nothing = dict.fromkeys(names.split())
    (tmp_path / "blend").write_text("0.3 a 0.7 b")
    (tmp_path / "splits").write_text('{"train": "1 a 2 b", "valid": ["c"], "test": null}')
    found = [
        get_blend_and_blend_per_split(Namespace(**nothing | given))
        for given in (
            {},
            {"data_path": ["a", "b"]},
            {"data_args_path": str(tmp_path / "blend")},
            {"train_data_path": ["a"], "valid_data_path": ["b"]},
            {"per_split_data_args_path": str(tmp_path / "splits")},
        )
    ]
    assert found == [
        (None, None),
        ((["a", "b"], None), None),
        ((["a", "b"], [0.3, 0.7]), None),
        (None, [(["a"], None), (["b"], None), None]),
        (None, [(["a", "b"], [1.0, 2.0]), (["c"], None), None]),
    ]


def test_timers(capsys: pytest.CaptureFixture[str]) -> None:
    timers = Timers(1, "minmax")
    timers("forward", log_level=1).start()
    timers("forward").stop()
    timers("detail", log_level=2).start()
    timers("detail").stop()
    with pytest.raises(AssertionError, match="not started"):
        timers("forward").stop()
    assert 0.0 < timers("forward").elapsed(reset=False) == timers("forward").active_time()
    timers.log()
    assert "forward ....." in (text := capsys.readouterr().out)
    assert "detail" not in text
    assert timers("forward").elapsed() == 0.0


def test_wrapped_models() -> None:
    inner = SimpleNamespace(config=3)
    outer = SimpleNamespace(module=SimpleNamespace(module=inner))
    assert get_model_config(outer) == 3
    assert unwrap_model([outer]) == [inner]
    with pytest.raises(ConfigError, match="couldn't find attribute x"):
        get_attr_wrapped_model(outer, "x")
    assert is_torch_min_version("2.0")
    assert not is_torch_min_version("99.0")


def test_former_paths_have_the_same_objects() -> None:
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.custom_layers import transformer_engine as former
    from megatron.training import activations, setup_model_and_optimizer, tokenizer, training

    assert former.TENorm is transformer_engine.TENorm
    assert former.te_checkpoint is transformer_engine.te_checkpoint
    assert setup_model_and_optimizer is training.setup_model_and_optimizer
    assert tokenizer.build_tokenizer is build_tokenizer
    assert activations.squared_relu(torch.tensor([-1.0, 3.0])).tolist() == [0.0, 9.0]


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_of_the_balancing_loss(function: str) -> None:
    logits = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([False, True, False, False, False])
    chosen, scores = compute_routing_scores_for_aux_loss(logits, 2, function, padding_mask=padding)
    raw = {"softmax": logits.exp(), "sigmoid": logits.sigmoid(), "sqrtsoftplus": (1 + logits.exp()).log().sqrt()}
    expected = raw[function] / raw[function].sum(-1, keepdim=True)
    torch.testing.assert_close(scores, expected * ~padding[:, None], rtol=1e-12, atol=0)
    for token, row in enumerate(chosen):
        best = [] if padding[token] else sorted(logits[token].argsort()[-2:].tolist())
        assert row.nonzero().flatten().tolist() == best


def test_memory_of_a_device_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of two devices, of which the second is this process's."""
    assert device_memory_summary() == "alloc=0MiB private=0MiB resv-alloc=0MiB resv=0MiB dev_mem=0MiB"
    pools = [(0, (0, 0), 1), (1, (0, 0), 2), (1, (0, 3), 4), (0, (0, 3), 8)]
    segments = [{"device": d, "segment_pool_id": pool, "active_size": n * 2**20} for d, pool, n in pools]
    answers = {
        **{"is_available": True, "current_device": 1, "memory_allocated": 6 * 2**20, "memory_reserved": 16 * 2**20},
        **{"memory_snapshot": segments, "mem_get_info": (40 * 2**20, 64 * 2**20)},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    assert device_memory_summary() == "alloc=6MiB private=4MiB resv-alloc=10MiB resv=16MiB dev_mem=24MiB"
