"""Run-time checks: errors raised by all ranks together, notes that name parameters, and no false alarms."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_core.data_parallel import Bucket
from megatron_core.errors import MegatronError
from megatron_core.ops import adamw_
from megatron_core.optimizer import algorithms
from megatron_core.parallel.collectives import all_gather_flat_
from megatron_core.parallel.texts import listed
from megatron_core.reports.checks import RunChecks
from megatron_core.training.loop import train
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

UNMOVED = "since this process started"
FINAL_NORM = "decoder.final_layernorm.weight"
OVERLAP = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
NOTHING: Callable[[Run], object] = lambda run: None  # noqa: E731


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With many threads, tiny steps wait longer for each other than they compute on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _watch(run: Run, steps: int, before_look: Callable[[int], object] = lambda step: None) -> str:
    """Run checked steps, and return the output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        checks = RunChecks(run)
        checks.before_run()
        for step in range(1, steps + 1):
            result = train_step(run)
            before_look(step)
            checks.after_step(result)
    return printed.getvalue()


def _norm_of_last_stage(run: Run) -> nn.Module | None:
    return run.stages[len(run.layers) - 1].decoder.final_layernorm if len(run.layers) - 1 in run.stages else None


def _drifts() -> str:
    run = tiny_run(replica_check_interval=2, **OVERLAP)

    def drift(step: int) -> None:
        if step == 4 and dist.get_rank() == 1:
            run.data_parallel.finish_param_sync()
            _norm_of_last_stage(run).weight.data[3] += 1.0

    with pytest.raises(MegatronError) as caught:
        _watch(run, 4, drift)
    assert run.state.iteration == 4
    return str(caught.value)


def test_all_ranks_stop_with_the_same_sentence() -> None:
    first, second = run_ranks(2, _drifts)
    assert first == second
    for words in ("at iteration 4", "over dp-cp: rank 1 differs from rank 0", "equal at iteration 2", "--ckpt-step"):
        assert words in first


def _starts_with_two_seeds() -> tuple[str, int]:
    run = tiny_run(seed=dist.get_rank(), eval_iters=0)
    with pytest.raises(MegatronError) as caught:
        train(run, [])
    return str(caught.value), run.state.iteration


def test_ranks_that_start_from_different_weights_never_take_a_step() -> None:
    (first, steps), second = run_ranks(2, _starts_with_two_seeds)
    assert (first, steps) == second
    assert steps == 0
    assert "before the first step" in first
    assert "--load" in first


def _noted(settings: dict, spoil: Callable[[Run], object], steps: int = 4) -> str:
    run = tiny_run(replica_check_interval=2, **settings)
    spoil(run)
    return _watch(run, steps)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, OVERLAP | {"bf16": True}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fp16": True}),
        (4, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4} | OVERLAP),
        (6, {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et||tL"} | OVERLAP),
    ],
    ids=["one", "dp2", "tp2", "pp2", "a rank without parameters"],
)
def test_sound_runs_say_nothing(world: int, settings: dict) -> None:
    assert run_ranks(world, _noted, settings, NOTHING) == [""] * world


def _gather_late(run: Run) -> None:
    """Weights arrive only in ``wait``: before, a rank has last step's values."""
    waiting: set[Bucket] = set()

    def finish(bucket: Bucket) -> None:
        if bucket in waiting:
            all_gather_flat_(bucket.weights, bucket.weight_shard, bucket.dp_group)
            waiting.remove(bucket)

    Bucket.start_gather, Bucket.finish_gather = lambda bucket: waiting.add(bucket), finish


def test_weights_that_are_on_their_way_are_waited_for() -> None:  # C59
    assert run_ranks(2, _noted, OVERLAP, _gather_late) == [""] * 2


def _detach(run: Run) -> None:
    norm = _norm_of_last_stage(run)
    if norm is not None:
        layer_norm = nn.functional.layer_norm
        norm.forward = lambda x: layer_norm(x, (norm.size,), norm.weight.detach(), norm.bias, norm.epsilon)


@pytest.mark.parametrize("settings", [{"pipeline_model_parallel_size": 2}, OVERLAP], ids=["pp2", "dp2"])
def test_detached_parameters_are_named_by_rank_0(settings: dict) -> None:  # C52
    said, silent = run_ranks(2, _noted, settings, _detach)
    no_gradient, unmoved = said.splitlines()
    assert no_gradient.startswith(f"note: parameters without a gradient in step 1, the first one: {FINAL_NORM}. ")
    assert unmoved.startswith(f"note: parameters unchanged at iteration 2 {UNMOVED}: {FINAL_NORM}. ")
    assert silent == ""


def _forget_a_bucket(run: Run) -> None:
    forgotten = run.optimizer.shards.pop()
    left = {key: [each for each in runs if each[0] is not forgotten] for key, runs in run.optimizer._runs.items()}
    run.optimizer._runs = {key: runs for key, runs in left.items() if runs}


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_parameters_that_the_optimizer_forgets_are_named(settings: dict) -> None:  # C52
    run = tiny_run(replica_check_interval=2, ddp_bucket_size=500, **settings)
    _forget_a_bucket(run)
    forgotten = run.data_parallel.buckets[-1].names
    said = _watch(run, 2)
    assert said.count("\n") == 1
    assert f"at iteration 2 {UNMOVED}: {listed(forgotten)}. " in said


def test_main_weights_that_are_not_copied_back_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:  # C52
    def without_copies(*lists: list[torch.Tensor], **rest: object) -> None:
        adamw_(*lists[:-1], **rest)

    monkeypatch.setattr(algorithms, "adamw_", without_copies)
    run = tiny_run(replica_check_interval=2, bf16=True)
    names = [name for bucket in run.data_parallel.buckets for name in bucket.names]
    assert f"at iteration 2 {UNMOVED}: {listed(names)}. " in _watch(run, 2)


def test_moves_below_the_precision_are_no_alarm() -> None:
    """A norm's weight of 1.0 in bfloat16 changes visibly only by 2^-9 or more, but its main weight does change."""
    run = tiny_run(replica_check_interval=2, bf16=True, lr=1e-6)
    before = _norm_of_last_stage(run).weight.detach().clone()
    assert _watch(run, 2) == ""
    assert torch.equal(_norm_of_last_stage(run).weight, before)


def test_skipped_steps_are_no_alarm() -> None:  # C64
    run = tiny_run(replica_check_interval=2, fp16=True, initial_loss_scale=2.0**40, hysteresis=1, train_iters=100)
    assert _watch(run, 6) == ""
    assert run.state.skipped_iterations == 6


def test_first_step_is_the_first_that_was_taken() -> None:
    run = tiny_run(replica_check_interval=1, fp16=True, initial_loss_scale=2.0**15, hysteresis=1)
    _detach(run)
    finish = run.data_parallel.finish_grad_sync

    def overflow_once() -> None:
        finish()
        if run.state.iteration == 0:
            run.data_parallel.buckets[0].grads[:1] = torch.inf

    run.data_parallel.finish_grad_sync = overflow_once
    no_gradient, unmoved = _watch(run, 3).splitlines()
    assert run.state.skipped_iterations == 1
    assert f"without a gradient in step 2, the first one: {FINAL_NORM}. " in no_gradient
    assert f"at iteration 2 {UNMOVED}: {FINAL_NORM}. " in unmoved


def test_steps_without_a_learning_rate_move_nothing_and_are_no_alarm() -> None:
    run = tiny_run(replica_check_interval=1)
    lr = run.schedule.lr
    run.schedule.lr = lambda step: 0.0 if step <= 2 else lr(step)
    assert _watch(run, 4) == ""


def test_adapters_that_start_at_zero_are_no_alarm() -> None:
    """While B is zero, A has no gradient; a parameter that never has one is still named, in the second step."""
    assert _watch(tiny_run(replica_check_interval=1, lora_rank=2), 3) == ""
    run = tiny_run(replica_check_interval=1, lora_rank=2, weight_decay=0.0)
    named = {
        name: p for bucket in run.data_parallel.buckets for name, p in zip(bucket.names, bucket.parameters, strict=True)
    }
    name = next(name for name in named if "layers.1.mlp.linear_fc1.adapter.lora_A" in name)
    named[name].register_hook(torch.zeros_like)
    no_gradient, unmoved = _watch(run, 3).splitlines()
    assert f"without a gradient in step 2, the first one: {name}" in no_gradient
    assert f"at iteration 2 {UNMOVED}: {name}" in unmoved


def test_short_runs_are_looked_at_in_their_last_step() -> None:
    run = tiny_run(train_iters=2)
    _forget_a_bucket(run)
    assert f"at iteration 2 {UNMOVED}" in _watch(run, 2)


def test_no_interval_no_comparison() -> None:
    run = tiny_run(replica_check_interval=None)
    _detach(run)
    checks = RunChecks(run)
    checks.replicas.hashes = lambda: pytest.fail("compared")
    checks.before_run()
    checks.after_step(train_step(run))
