"""Steps in 16 bits, skipped steps, and state that evaluation must not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_core.datasets import MockDataset, Splits
from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from megatron_core.resilience.bad_steps import BadSteps
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_config, tiny_run


def _weights(run: Run) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for stage in run.stages.values()
        for name, parameter in stage.named_global_parameters()
    }


def _losses(settings: dict, steps: int = 8) -> list[float]:
    run = tiny_run(**settings)
    return [train_step(run).loss for _ in range(steps)]


def test_training_learns() -> None:
    losses = _losses({"train_iters": 40}, steps=40)
    assert abs(losses[0] - math.log(61)) < 0.2
    assert losses[-1] < losses[0] - 1.0


def test_every_parameter_moves() -> None:  # C52
    run = tiny_run(normalization="RMSNorm", swiglu=True, qk_layernorm=True, position_embedding_type="rope")
    before = _weights(run)
    for _ in range(3):
        train_step(run)
    still = [name for name, weight in _weights(run).items() if torch.equal(weight, before[name])]
    assert still == []


@pytest.mark.drawn(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}], ids=["dp", "tp"])
def test_sixteen_bits_follow_float32(precision: str, layout: dict) -> None:
    """bfloat16 has 8 bits of mantissa, a relative step of 2^-8; float16 has 11. The losses are that close."""
    world = 2 if layout else 1
    wide = run_ranks(1, _losses, {})[0]
    narrow = run_ranks(world, _losses, {precision: True, "initial_loss_scale": 2.0**16} | layout)[0]
    assert narrow == pytest.approx(wide, rel=2.0**-8)
    assert narrow != wide


def test_sharded_optimizer_in_bf16_equals_the_whole_one() -> None:
    """Main weights and moments are bitwise equal in all placements.

    Without clipping, because its norm is summed shard by shard.
    """
    settings = {"bf16": True, "clip_grad": 0.0}
    whole = run_ranks(2, _losses, settings)
    sharded = run_ranks(2, _losses, settings | {"use_distributed_optimizer": True, "overlap_param_gather": True})
    assert whole == sharded


def test_loss_scale_does_not_change_gradients() -> None:  # C37
    """float32 arithmetic with a power of two as factor is exact: the norm must not change."""
    run, scaled = tiny_run(), tiny_run()
    scaled.optimizer.loss_scale.scale = 1024.0
    assert train_step(run).grad_norm == train_step(scaled).grad_norm


def test_evaluation_leaves_training_alone() -> None:  # C48
    plain, watched = tiny_run(hidden_dropout=0.1), tiny_run(hidden_dropout=0.1)
    train_step(plain)
    train_step(watched)
    state = torch.get_rng_state()
    first = evaluate(watched, watched.splits.valid, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert evaluate(watched, watched.splits.valid, 3) == first
    assert train_step(watched) == train_step(plain)


def _evaluated(layout: dict) -> float:
    run = tiny_run(**layout)
    return evaluate(run, run.splits.valid, 2)


def test_evaluation_is_the_same_in_every_layout() -> None:
    settings = {"fp64": True, "num_layers": 4}
    alone = run_ranks(1, _evaluated, settings)[0]
    chunks = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    for layout in ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, chunks, {}):
        for loss in run_ranks(2, _evaluated, settings | layout):
            assert loss == pytest.approx(alone, rel=1e-12)


def test_nan_ends_the_run_with_advice() -> None:
    run = tiny_run()
    next(iter(run.stages.values())).decoder.final_layernorm.weight.data.fill_(torch.nan)
    result = train_step(run)
    assert result.skipped
    with pytest.raises(Exception, match=r"the loss is nan at iteration 1 .*--lr"):
        BadSteps(run).after_step(result)


def test_no_token_counts_at_all() -> None:  # C3
    """A global batch without an unmasked token has loss 0 and gradient 0, not nan."""
    run = tiny_run()
    step = run.train_loader.step

    def masked(*place: int) -> list[dict[str, torch.Tensor]]:
        return [batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])} for batch in step(*place)]

    run.train_loader.step = masked
    result = train_step(run)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)


def test_steps_grow_with_the_samples() -> None:
    run = tiny_run(rampup_batch_size=(2, 2, 12), seq_length_warmup=(4, 6, 10), train_samples=40, train_iters=None)
    sizes = []
    while run.state.iteration < run.total_iterations:
        size = train_step(run).size
        sizes.append((size.consumed_samples, size.batch_size, size.num_microbatches, size.sequence_length))
    expected = [(0, 2, 1, 4), (2, 2, 1, 4), (4, 4, 2, 4), (8, 6, 3, 10), (14, 8, 4, 16), (22, 8, 4, 16), (30, 8, 4, 16)]
    assert sizes == expected
    assert run.state.consumed_tokens == sum(batch * length for _, batch, _, length in expected)


def test_a_growing_run_is_evaluated_at_full_size() -> None:
    growing, plain = tiny_run(rampup_batch_size=(2, 2, 12), seq_length_warmup=(4, 6, 10)), tiny_run()
    assert evaluate(growing, growing.splits.valid, 2) == evaluate(plain, plain.splits.valid, 2)


def test_data_sets_of_a_script() -> None:
    """The same mock data, passed in explicitly, gives the same losses; missing data sets are reported."""
    mine = Splits(*(MockDataset(61, 16, 1234 + offset) for offset in range(3)))
    config = tiny_config(mock_data=False, dataloader_type="external")
    world = World(0, 1, local_rank=0, device=torch.device("cpu"))
    run = set_up(config, world, lambda config, tokenizer: mine)
    assert [train_step(run).loss for _ in range(3)] == _losses({}, steps=3)
    with pytest.raises(ConfigError, match="dataloader_type=external and no datasets_provider"):
        set_up(config, world)
    with pytest.raises(ConfigError, match="dataloader_type=single and a datasets_provider"):
        set_up(tiny_config(), world, lambda config, tokenizer: mine)


class _Waits(TorchDispatchMode):
    """Counts synchronizations with a device: a number read from a tensor (item, bool, float, int), or a shape that
    depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("settings", [{}, {"fp16": True}], ids=["float32", "fp16"])
def test_a_step_waits_for_the_device_once(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient norm, loss and stop request are one copy to the host; a whole evaluation also has one."""
    monkeypatch.setattr("megatron_core.tensor_parallel.layers._check_ids", lambda *ids: None)  # for tokens on the CPU
    run, lists = tiny_run(**settings), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor.shape) or tolist(tensor))
    with _Waits() as waits:
        train_step(run)
        assert (waits.count, lists) == (0, [(4,)])
        evaluate(run, run.splits.valid, 3)
    assert (waits.count, lists) == (0, [(4,), (2,)])
