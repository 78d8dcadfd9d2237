"""Groups of replicas: the step without drift, evaluation, traffic, checkpoints, and 4-bit numbers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_core.errors import CheckpointError
from megatron_core.features.outer_steps.optimizer import from_e3m0, packed_codes, to_e3m0, unpacked
from megatron_core.features.outer_steps.part import OuterSteps, groups_report
from megatron_core.reports.memory_report import planned_bytes
from megatron_core.reports.meter import METER
from megatron_core.training.callbacks import Callback
from megatron_core.training.driver import StepHooks
from megatron_core.training.loop import evaluate_split, train
from megatron_core.training.setup import Run
from megatron_core.training.state import open_checkpoint
from megatron_core.training.step import StepResult, evaluate, train_step
from megatron_core.verify.ranks import run_ranks
from tests.parity.sparse_rows import DSA, WARMUP
from tests.runs import tiny_config, tiny_run

SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "clip_grad": 0.0, "weight_decay": 0.1, "lr": 0.1}
ALONE = {"outer_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
STREAMS = {"outer_steps": 3, "outer_fragments": 2, "outer_delay": 2, "outer_alpha": 0.25, "fp64": True}
BF16 = {"outer_steps": 2, "outer_exchange": "bf16", "bf16": True}
TP2 = {"tensor_model_parallel_size": 2}


def _weights(settings: dict) -> dict[str, np.ndarray]:
    """The weights after three steps of two ranks, on text without masks."""
    run = tiny_run(fp64=True, **settings)
    for _ in range(3):
        train_step(run)
    names = [name for stage in run.stages.values() for name, _ in stage.named_global_parameters()]
    parameters = [parameter for stage in run.stages.values() for parameter in stage.parameters()]
    return {name: each.detach().numpy().copy() for name, each in zip(names, parameters, strict=True)}


def test_an_exchange_after_each_step_of_sgd_is_plain_data_parallelism() -> None:
    """The mean of the groups' steps is the step with the mean gradient, if all groups have as many tokens."""
    together, alone = run_ranks(2, _weights, SGD)[0], run_ranks(2, _weights, SGD | ALONE)
    for name, expected in together.items():
        for found in alone:
            np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-12, err_msg=name)


def _together() -> tuple[bool, bool, bool, bool, bool]:
    """A step with a gradient that is not finite in the second group, and one whose second group requests a stop."""
    run = tiny_run(outer_steps=1, zero_stage=1)
    before = [shard.main.clone() for shard in run.optimizer.shards]

    def spoil() -> None:
        if run.world.rank == 1:
            run.data_parallel.buckets[0].grad_shard[0] = torch.nan

    bad = train_step(run, hooks=StepHooks(before_update=spoil))
    same = all(torch.equal(a, shard.main) for a, shard in zip(before, run.optimizer.shards, strict=True))
    good = train_step(run, stop=run.world.rank == 1)
    planned = planned_bytes(run) == sum(run.state_bytes()[kind] for kind in ("weights", "gradients", "optimizer"))
    return bad.skipped, same, good.skipped, good.stop, planned


def test_groups_skip_and_stop_together() -> None:
    assert run_ranks(2, _together) == [(True, True, False, True, True)] * 2


class Uneven(Callback):
    """In the second step the second group waits until the first one has completed it, and has a gradient that is not
    finite; it requests a stop from the first step on."""

    def __init__(self, done: Path) -> None:
        self._done = done
        self.found: list[tuple[bool, bool, int]] = []
        """Of each step: whether it was skipped, whether the job stops, and the number of groups that have reported."""

    def before_update(self) -> None:
        """Wait and spoil the gradient."""
        if self.run.world.rank == 1 and self.run.state.iteration == 1:
            deadline = time.monotonic() + 30
            while not self._done.exists():
                assert time.monotonic() < deadline, "the first group waits for the second one"
                time.sleep(0.005)
            self.run.data_parallel.buckets[0].grad_shard[0] = torch.nan

    def after_step(self, result: StepResult) -> None:
        """Record the step; the first group tells the second one that it has completed it."""
        self.found.append((result.skipped, result.stop, len(result.groups)))
        self.run.stop_reason = "a test" if self.run.world.rank == 1 else ""
        if self.run.world.rank == 0 and self.run.state.iteration == 2:
            self._done.touch()


def _apart(folder: Path) -> tuple[list[tuple[bool, bool, int]], int, int, float]:
    """Train until the stop."""
    run = tiny_run(outer_steps=3, zero_stage=1, check_for_nan_in_loss_and_grad=False)
    uneven = Uneven(folder / "done")
    train(run, [], [uneven])
    lr = run.schedule.lr(run.state.iteration - run.state.skipped_iterations)
    return uneven.found, run.optimizer.steps_taken, run.state.iteration, lr


def test_a_group_is_not_delayed_by_a_slow_one_before_the_exchange(tmp_path: Path) -> None:
    (first, *counters), (second, *others) = run_ranks(2, _apart, tmp_path)
    assert first == [(False, False, 0), (False, False, 0), (False, True, 2)]
    assert second == [(False, False, 0), (True, False, 0), (False, True, 2)]
    assert counters == others and counters[:2] == [3, 3]


def test_groups_that_must_act_together_report_in_every_step() -> None:
    alone = tiny_config(outer_steps=4, outer_fragments=2)
    assert [groups_report(alone, step) for step in range(1, 7)] == [False, True, False, True, False, True]
    for settings in ({"recover": "in-process"}, {"max_bad_steps": 2}, {"outer_steps": 1, "outer_fragments": 1}):
        config = tiny_config(**{"outer_steps": 4} | settings)
        assert all(groups_report(config, step) for step in range(1, 7))


def _evaluated() -> tuple[float, float, float, bool]:
    """The loss of the evaluation in training, that of the global and of the own weights, and whether bits remain."""
    run = tiny_run(outer_steps=3, fp64=True, eval_iters=1)
    for _ in range(4):
        train_step(run)
    (dataset,) = run.splits.of("validation").values()
    before = [shard.main.clone() for shard in run.optimizer.shards]
    own = evaluate(run, dataset, 1)
    losses: list[float] = []

    class Called:
        def call(self, name: str, event: object) -> None:
            losses.append(event.loss)

    evaluate_split(run, Called(), "validation")
    same = all(torch.equal(a, shard.main) for a, shard in zip(before, run.optimizer.shards, strict=True))
    with torch.no_grad():
        for fragment in run.part(OuterSteps).outer.fragments:
            for piece, values in fragment.parts(fragment.weights):
                piece.main.copy_(values)
    return losses[0], evaluate(run, dataset, 1), own, same


def test_evaluation_uses_the_global_weights() -> None:
    first, second = run_ranks(2, _evaluated)
    assert first[0] == first[1] == second[0] == second[1]
    assert first[2] != first[0] and second[2] != first[2]
    assert first[3] and second[3]


def _sent(settings: dict) -> dict[str, float]:
    """The bytes that this rank sends in four steps, by group."""
    run = tiny_run(**settings)
    METER.start(run.groups, run.world.device)
    for _ in range(4):
        result = train_step(run)
    found: dict[str, float] = {}
    for name, traffic in METER.take().traffic.items():
        axes = name.rpartition(" ")[0]
        found[axes] = found.get(axes, 0.0) + traffic.bytes
    METER.stop()
    groups = len(result.groups)
    assert groups == 0 or result.breakdown["lm loss by group/1"] == result.groups[1][0] != result.groups[0][0]
    return found | {"groups": groups}


@pytest.mark.every_case
@pytest.mark.parametrize(("exchange", "share"), [("full", 1.0), ("bf16", 0.5), ("fp8", 0.25), ("fp4", 0.125)])
def test_four_steps_send_the_weights_once(exchange: str, share: float) -> None:
    """Of two groups each sends 4 bytes of each parameter at once, instead of in each step."""
    whole, groups = (run_ranks(2, _sent, each)[0] for each in ({}, {"outer_steps": 4, "outer_exchange": exchange}))
    assert groups["groups"] == 2 and whole["groups"] == 0
    assert groups["outer"] == pytest.approx(share * whole["dp"] / 4, rel=0.02)
    assert 0 < groups["outer reports"] < 60  # once


def _steps(settings: dict, steps: int, save: bool = False) -> list[dict[str, np.ndarray]]:
    """Train and return the losses, and the state of this rank's group and of the global weights, by name."""
    run = tiny_run(**settings)
    losses = [train_step(run).loss for _ in range(steps - run.state.iteration)]
    if save:
        run.saver.save(run.state)
        run.saver.close()
    return [{"losses": np.array(losses)}, _state(run)]


def _state(run: Run) -> dict[str, np.ndarray]:
    found = {}
    for shard in run.optimizer.shards:
        for kind, flat in (shard.state | {"main": shard.main}).items():
            for name, _, start, stop, at in shard.bucket.pieces():
                found[f"{kind} {name} {start}"] = flat[at : at + stop - start].double().numpy().copy()
    for fragment in run.part(OuterSteps).outer.fragments:
        fragment.arrive()
        for kind in ("weights", "momentum"):
            for piece, values in fragment.parts(getattr(fragment, kind)):
                found[f"global {kind} {piece.name} {piece.start}"] = values.double().numpy().copy()
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [STREAMS, BF16], ids=["streams", "bf16"])
def test_a_resumed_run_continues_exactly(settings: dict, tmp_path: Path) -> None:
    """The checkpoint of step 4 is between two exchanges, with one in flight."""
    folder = {"save": str(tmp_path), "load": str(tmp_path)}
    whole = run_ranks(2, _steps, settings, 7)
    run_ranks(2, _steps, settings | folder, 4, True)
    resumed = run_ranks(2, _steps, settings | folder, 7)
    for (losses, expected), (later, found) in zip(whole, resumed, strict=True):
        assert np.array_equal(losses["losses"][4:], later["losses"])
        assert expected.keys() == found.keys()
        assert [name for name in expected if not np.array_equal(expected[name], found[name])] == []


def _reloaded(settings: dict, steps: int) -> list[float]:
    """The losses of further steps."""
    run = tiny_run(**settings)
    return [train_step(run).loss for _ in range(steps)]


def test_a_checkpoint_continues_in_another_layout(tmp_path: Path) -> None:
    folder = {"save": str(tmp_path), "load": str(tmp_path)}
    run_ranks(2, _steps, STREAMS | folder, 4, True)
    alike = run_ranks(2, _reloaded, STREAMS | folder, 3)[0]
    other = run_ranks(4, _reloaded, STREAMS | folder | {"use_distributed_optimizer": True, "micro_batch_size": 1}, 3)[0]
    split = run_ranks(4, _reloaded, STREAMS | folder | TP2, 3)[0]
    assert other == pytest.approx(alike, rel=1e-9) and split == pytest.approx(alike, rel=1e-9)


def _frozen(settings: dict, save: bool = False) -> dict[str, np.ndarray]:
    """The frozen weights of this rank; memory is filled with NaN before they are loaded."""
    torch.use_deterministic_algorithms(True)  # fills memory that is not initialized
    run = tiny_run(**settings)
    if save:
        train_step(run)
        run.saver.save(run.state)
        run.saver.close()
    return {name: parameter.detach().double().numpy().copy() for name, parameter in run.data_parallel.frozen}


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_resumed_run_has_the_frozen_weights(precision: str, tmp_path: Path) -> None:
    folder = {"save": str(tmp_path), "load": str(tmp_path), "num_layers": 1, "micro_batch_size": 1}
    settings = DSA | WARMUP | folder | {precision: True, "outer_steps": 2, "global_batch_size": 2}
    saved = run_ranks(2, _frozen, settings, True)
    for expected, found in zip(saved, run_ranks(2, _frozen, settings), strict=True):
        assert len(expected) > 10 and expected.keys() == found.keys()
        assert [name for name in expected if not np.array_equal(expected[name], found[name])] == []


def _rolled_back(folder: str) -> list[bool]:
    """Whether the run keeps a sent gradient: at the checkpoint, four steps later, and back at the checkpoint."""
    run = tiny_run(outer_steps=4, outer_delay=2, recover="in-process", save=folder, load=folder)
    (fragment,) = run.part(OuterSteps).outer.fragments
    kept = []
    for steps in (5, 4):
        for _ in range(steps):
            train_step(run)
        kept.append(fragment.sent is not None)
        if steps == 5:
            run.saver.save(run.state)
            run.saver.finish()
    config = replace(run.config, checkpoint=run.config.checkpoint.for_resume())
    reader, _ = open_checkpoint(config)
    run.load(config, reader)
    return [*kept, fragment.sent is not None, fragment.in_flight]


def test_a_rollback_keeps_no_gradient_of_later_steps(tmp_path: Path) -> None:
    """The mean of the exchange in flight is in the checkpoint."""
    assert run_ranks(2, _rolled_back, str(tmp_path)) == [[True, True, False, True]] * 2


def _refused(settings: dict) -> str:
    try:
        tiny_run(**settings)
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_number_of_groups_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = {"save": str(tmp_path), "load": str(tmp_path)}
    run_ranks(2, _steps, {"outer_steps": 2} | folder, 3, True)
    assert "outer_steps=0" in run_ranks(2, _refused, folder)[0]
    message = run_ranks(4, _refused, {"outer_steps": 2, "outer_groups": 4} | folder | {"micro_batch_size": 1})[0]
    assert "outer_groups=4" in message and "has the state of 2 groups" in message and "--no-load-optim" in message
    assert run_ranks(1, _refused, folder | {"no_load_optim": True})[0] == ""


def test_numbers_of_4_bits_are_the_nearest_ones() -> None:
    values = torch.linspace(-1.0, 1.0, 4001, dtype=torch.float64)
    known = from_e3m0(torch.arange(16), torch.float64)
    found = from_e3m0(unpacked(packed_codes(to_e3m0(values)), len(values)), torch.float64)
    nearest = (values.view(-1, 1) - known).abs().min(1).values
    torch.testing.assert_close((values - found).abs(), nearest, rtol=0, atol=1e-15)
    assert len(packed_codes(to_e3m0(values))) == 2001
