"""A user's program with the functions of ``megatron.training``: every layout gives the results of one process."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import dist_checkpointing, mpu
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import StragglerDetector
from megatron.training import get_args, initialize_megatron, pretrain, training
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.training import evaluate, get_model, train_step
from megatron.training.utils import get_batch_on_this_tp_rank, get_blend_and_blend_per_split
from megatron.training.yaml_arguments import core_transformer_config_from_yaml
from megatron_core.errors import ConfigError, DataError
from megatron_core.parallel.groups import ALONE
from megatron_core.verify.ranks import run_ranks

COMMON = (
    "program.py --num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --fp64 --lr 0.01 "
    "--clip-grad 0.5 --attention-dropout 0 --lr-warmup-iters 1 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--vocab-size 24 --make-vocab-size-divisible-by 8 --tokenizer-type NullTokenizer --max-position-embeddings 8 "
    "--distributed-backend gloo --position-embedding-type rope --calculate-per-token-loss --eval-iters 1 "
    "--transformer-impl local --log-interval 1 "
)
STRAGGLERS = StragglerDetector()
LAYOUTS = {
    "tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2 v2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "dp2 zero1": "--use-distributed-optimizer --overlap-grad-reduce",
}


def model_provider(pre_process: bool = True, post_process: bool = True, **given: Any) -> GPTModel:
    """The function as in programs for Megatron-LM, with any further arguments: those that Megatron-LM passes."""
    args, chunks = get_args(), mpu.get_virtual_pipeline_model_parallel_world_size()
    vp_stage = None if chunks is None else given.pop("vp_stage")
    assert given == {"config": None, "pg_collection": None}
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(args.num_experts, args.moe_grouped_gemm, args.qk_layernorm),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples with ragged masks."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 24, (9,), generator=draw)
        mask = (torch.rand(8, generator=draw) < 0.6).float()
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": torch.arange(8)}


def datasets(sizes: tuple[int, int, int]) -> list[Text | None]:
    """Random text on the ranks that read data."""
    assert sizes[0] == 16
    return [Text() if mpu.get_tensor_model_parallel_rank() == 0 else None] * 2 + [None]


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    with STRAGGLERS(bdata=True):
        tokens, labels, mask, attention_mask, positions = get_batch_on_this_tp_rank(data_iterator).values()
    with STRAGGLERS:
        output = model(tokens, positions, attention_mask, labels=labels)
    return output, partial(loss_func, mask)


def loss_func(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = (output.view(-1) * mask.view(-1)).sum()
    return total, mask.sum().int(), {"lm loss": torch.stack([total.detach(), mask.sum().to(total)])}


def job(save: str, more: str) -> tuple[list[list[float]], list[float], list[str]]:
    """The loss (0 before the last stage), norm and rate of every step, losses of evaluations, and the printed text."""
    taken, evaluated, out = [], [], StringIO()

    def step(*given: Any, **named: Any) -> Any:
        result = train_step(*given, **named)
        assert result[1:5] == (0, False, False, 0)
        taken.append([float(result[0].get("lm loss", 0.0)), result[5], given[3].param_groups[0]["lr"]])
        return result

    def evaluation(*given: Any, **named: Any) -> Any:
        result = evaluate(*given, **named)
        evaluated.append(float(result[0].get("lm loss", 0.0)))
        return result

    training.train_step, training.evaluate = step, evaluation  # type: ignore[assignment]
    sys.argv = f"{COMMON} --save {save} --save-interval 2 {more}".split()
    mpu.destroy_model_parallel()
    with redirect_stdout(out):
        pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step, args_defaults={"seed": 7})
    assert get_args().iteration == 4
    return taken, evaluated, out.getvalue().splitlines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(1, job, str(tmp_path_factory.mktemp("alone")), "")[0]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_trains_as_one_process_and_goes_on_from_its_checkpoint(
    alone: Any, layout: str, tmp_path: Path
) -> None:
    expected, evaluations, _ = alone
    ranks = run_ranks(2, job, str(tmp_path), LAYOUTS[layout])
    for taken, evaluated, _ in ranks:
        np.testing.assert_allclose(np.array(taken)[:, 1:], np.array(expected)[:, 1:], rtol=0, atol=1e-9)
        if taken[0][0]:
            np.testing.assert_allclose([loss for loss, *_ in taken], [loss for loss, *_ in expected], atol=1e-9)
            np.testing.assert_allclose(evaluated, evaluations, rtol=0, atol=1e-9)
    assert any(taken[0][0] for taken, *_ in ranks)
    assert "iteration        4/       4" in " ".join(ranks[-1][2])
    assert [float(loss) for loss in ranks[-1][1]], "evaluated"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    more, *_ = run_ranks(1, job, str(tmp_path / "more"), f"--load {tmp_path}")[0]
    np.testing.assert_allclose(more, expected[2:], rtol=0, atol=1e-9)


def cut_matrices(more: str) -> list[bool]:
    """Whether a shard cuts a parameter of each bucket of hidden matrices."""
    sys.argv = f"{COMMON} --optimizer muon --use-distributed-optimizer {more}".split()
    mpu.destroy_model_parallel()
    with redirect_stdout(StringIO()):
        initialize_megatron()
        (model,) = get_model(model_provider)
    return [bucket.cuts_parameters for bucket in model.buckets if bucket.kind.is_hidden_matrix]


def test_a_launch_with_muon_shards_whole_matrices() -> None:
    for cuts in run_ranks(2, cut_matrices, ""):
        assert cuts == [False]
    # Otherwise they share a bucket with other weights until the optimizer separates them.
    assert run_ranks(2, cut_matrices, "--no-use-layer-wise-param-layout") == [[], []]


def evaluated_as_conversations(save: str) -> tuple[list[float], list[float]]:
    """Losses of evaluations with ``args.sft``, and the means over ranks and micro-batches of means over tokens."""
    reported, expected, means = [], [], []

    def step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
        output, loss = forward_step(data_iterator, model)

        def kept(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, count, report = loss(output)
            means.append((total / count.clamp(min=1)).item())
            return total, count, report

        return output, kept

    def evaluation(*given: Any, **named: Any) -> Any:
        means.clear()
        get_args().sft = True
        result = evaluate(step, *given[1:], **named)
        get_args().sft = False
        total = torch.tensor([sum(means), len(means)], dtype=torch.float64)
        dist.all_reduce(total)
        reported.append(result[0]["lm loss"].item())
        expected.append((total[0] / total[1]).item())
        return result

    training.evaluate = evaluation
    sys.argv = f"{COMMON} --save {save}".split()
    mpu.destroy_model_parallel()
    with redirect_stdout(StringIO()):
        pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step)
    return reported, expected


def test_evaluations_of_conversations_are_means_of_means(tmp_path: Path) -> None:
    """As in Megatron-LM's ``evaluate``."""
    for reported, expected in run_ranks(2, evaluated_as_conversations, str(tmp_path)):
        assert len(reported) > 0
        np.testing.assert_allclose(reported, expected, rtol=1e-12)


def test_a_resumed_program_takes_one_of_two_schedules(alone: Any, tmp_path: Path) -> None:
    """With another learning rate, weight decay and minimum; the rates against the formula."""
    run_ranks(1, job, str(tmp_path), "")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    changed = f"--load {tmp_path} --lr 0.04 --min-lr 0.001 --weight-decay 0.2"
    stored, *_ = run_ranks(1, job, str(tmp_path / "a"), f"{changed} --use-checkpoint-opt-param-scheduler")[0]
    np.testing.assert_allclose(stored, alone[0][2:], rtol=0, atol=1e-9)
    given, *_ = run_ranks(1, job, str(tmp_path / "b"), f"{changed} --override-opt-param-scheduler")[0]
    # Warm-up ends after step 1, the linear decay after step 4; the rates after steps 3 and 4 are printed.
    expected = [0.001 + (0.04 - 0.001) * (1 - (step - 1) / (4 - 1)) for step in (3, 4)]
    np.testing.assert_allclose([rate for *_, rate in given], expected, rtol=1e-12)
    with pytest.raises(Exception, match=r"max_lr=0.04, but the checkpoint has 0.01; set override_opt_param_scheduler"):
        run_ranks(1, job, str(tmp_path / "c"), changed)


def test_a_resumed_program_goes_on_in_its_validation_data(tmp_path: Path) -> None:
    whole = run_ranks(1, job, str(tmp_path), "--eval-interval 2")[0][1]
    assert len(set(whole)) == len(whole) == 3
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run_ranks(1, job, str(tmp_path / "more"), f"--eval-interval 2 --load {tmp_path}")[0][1]
    np.testing.assert_allclose(resumed, whole[1:], rtol=0, atol=1e-9)


def scheduled(more: str) -> tuple[int, int]:
    """Steps and samples of a training run whose batches grow from 1 to 4 sequences."""
    given = COMMON.replace("--train-iters 4", "").replace("--lr-warmup-iters 1", "")
    sys.argv = f"{given} --step-batch-size-schedule 0:1 48:4 {more}".split()
    mpu.destroy_model_parallel()
    with redirect_stdout(StringIO()):
        pretrain(lambda sizes: [Text(), None, None], model_provider, ModelType.encoder_or_decoder, forward_step)
    assert get_args().train_iters == get_args().iteration
    return get_args().iteration, get_args().consumed_train_samples


@pytest.mark.parametrize(("more", "expected"), [("--train-samples 16", (8, 14)), ("--train-iters 7", (7, 10))])
def test_batches_grow_as_scheduled(more: str, expected: tuple[int, int]) -> None:
    """Six steps with one sequence of 8 tokens, then steps with four."""
    assert run_ranks(1, scheduled, more) == [expected]


def test_flags_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    more = "--no-mmap-bin-files --num-dataset-builder-threads 3 --swiglu --no-load-rng --no-load-optim"
    monkeypatch.setattr(sys, "argv", (COMMON + more).split())
    args = parse_args()
    given = ("mmap_bin_files", "num_dataset_builder_threads", "swiglu", "no_load_rng", "no_load_optim")
    assert [getattr(args, name) for name in given] == [False, 3, True, True, True]
    absent = ("create_attention_mask_in_dataloader", "sft", "yaml_cfg", "use_legacy_models", "bias_swiglu_fusion")
    assert [getattr(args, name, "?") for name in absent] == [True, False, None, False, True]
    assert (args.calculate_per_token_loss, args.transformer_impl) == (True, "local")
    assert get_blend_and_blend_per_split(args) == (None, None)
    with pytest.raises(ConfigError, match="--config FILE"):
        core_transformer_config_from_yaml(args)


def test_results_are_checked() -> None:
    machine = get_rerun_state_machine()
    assert [machine.should_run_forward_backward(None) for _ in range(4)] == [True, False] * 2
    assert machine.should_checkpoint_and_exit() == (False, False, 0)
    nan = torch.tensor(float("nan"))
    machine.validate_result(torch.ones(()), torch.isnan)
    with pytest.raises(DataError, match="found NaN: nan"):
        machine.validate_result(nan, torch.isnan, message="found NaN", tolerance=0.0)
    with pytest.warns(UserWarning, match="found NaN"):
        machine.validate_result(nan, torch.isnan, message="found NaN", fatal=False)
    values = [1.0, 3.0, 29.0, 31.0]
    assert [machine.is_unexpectedly_large(x, 10, "loss", 2) for x in values] == [False, False, False, True]


def whole_linear(sequence_parallel: bool) -> list[np.ndarray]:
    """The gradient of a weight on both ranks, summed over the parts of a sequence."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
    )
    layer = TELinear(4, 3, parallel_mode="duplicated", config=config, skip_bias_add=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(12.0).view(3, 4))
    x = torch.arange(16.0).view(4, 1, 4)
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    output, bias = model(x.chunk(size)[rank] if sequence_parallel else x)
    assert bias is layer.bias
    output.square().sum().backward()
    model.finish_grad_sync()
    return [layer.weight.main_grad.numpy()]


def test_a_linear_layer_that_is_whole() -> None:
    expected = run_ranks(1, whole_linear, False)[0]
    for sequence_parallel in (False, True):
        for found in run_ranks(2, whole_linear, sequence_parallel):
            np.testing.assert_array_equal(found, expected)
    with pytest.raises(ConfigError, match="TEColumn"):
        TELinear(4, 3, parallel_mode="column", config=None)


def language_losses() -> list[float]:
    """With logits split over both ranks."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(torch.distributed.get_world_size())
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2)
    logits = torch.arange(24.0).view(3, 1, 8).sin()
    part = logits.chunk(mpu.get_tensor_model_parallel_world_size(), -1)[mpu.get_tensor_model_parallel_rank()]
    labels = torch.tensor([[1, 7, 4]])
    found = LanguageModule(config).compute_language_model_loss(labels, part)
    expected = torch.nn.functional.cross_entropy(logits[:, 0], labels[0], reduction="none")
    torch.testing.assert_close(found, expected[None])
    return found[0].tolist()


def test_losses_of_a_language_module() -> None:
    one, two = run_ranks(1, language_losses)[0], run_ranks(2, language_losses)
    assert two == [pytest.approx(one)] * 2


def test_stages_and_strategies(tmp_path: Path) -> None:
    assert [is_vp_first_stage(None, None), is_vp_first_stage(1, 2), is_vp_last_stage(1, 2)] == [True, False, True]
    assert is_pp_first_stage(ALONE)
    assert is_pp_last_stage(ALONE)
    saves = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), None, True)
    dist_checkpointing.save({"a": 1}, tmp_path, saves)
    loads = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(tmp_path), None)
    assert dist_checkpointing.load({"a": 0}, tmp_path, loads) == {"a": 1}


def test_programs_may_pass_the_blends_of_all_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``pretrain_gpt.py`` of Megatron Core 0.8, which tests each blend itself for None."""
    monkeypatch.setattr(sys, "argv", f"{COMMON} --data-path text --split 8,1,1".split())
    args = parse_args()
    each = [get_blend_from_list(given) for given in (args.train_data_path, args.valid_data_path, args.test_data_path)]
    blend = get_blend_from_list(args.data_path)
    config = BlendedMegatronDatasetConfig(
        random_seed=1, sequence_length=8, blend=blend, blend_per_split=each, split=args.split
    )
    assert (config.blend, config.blend_per_split, config.mock) == ((["text"], None), [None] * 3, False)


@pytest.mark.parametrize(
    ("flag", "pattern"), [("", 1), ("--moe-layer-freq 2", 2), ("--moe-layer-freq ([0]+[1]*3)", [0, 1, 1, 1])]
)
def test_patterns_of_layers_have_the_types_of_megatron(
    monkeypatch: pytest.MonkeyPatch, flag: str, pattern: Any
) -> None:
    """Copies of Megatron-LM's count of FLOPs refuse others than an int or a list."""
    monkeypatch.setattr(sys, "argv", f"{COMMON} --num-experts 2 {flag}".split())
    args = validate_args(parse_args())
    assert (args.moe_layer_freq, args.no_rope_freq) == (pattern, None)
    assert isinstance(args.moe_layer_freq, int | list)
    assert core_transformer_config_from_args(args).moe_layer_freq == pattern
