"""Repetition of steps with suspicious results: verdicts, and what happens to the step."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch

from megatron_core.config.validate import problems
from megatron_core.parallel import World
from megatron_core.parallel.grid import Grid
from megatron_core.resilience.rerun import Attempt, Reruns
from megatron_core.resilience.wrong_step import WrongStepError
from megatron_core.training.loop import train
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted
from tests.runs import tiny_config, tiny_run
from tests.training.test_resilience import Losses

SETTINGS = {
    "num_layers": 1, "hidden_size": 16, "seq_length": 8, "vocab_size": 29, "global_batch_size": 4, "train_iters": 4,
    "eval_iters": 0, "micro_batch_size": 1, "max_bad_steps": 4, "fp64": True,
    "seed": 31,  # errors are injected in steps 2 and 3
}  # fmt: skip
RERUN = {"rerun_mode": "validate_results"}


def _trained(settings: dict) -> tuple[Losses, str, bool]:
    out, losses = io.StringIO(), Losses()
    with redirect_stdout(out):
        run = tiny_run(**SETTINGS | settings)
        train(run, [losses])
    return losses, out.getvalue(), bool(run.stop_reason)


def _job(settings: dict) -> str:
    losses, said, stopped = _trained(settings)
    return json.dumps([losses.taken, losses.skipped, said, stopped])


def on_ranks(ranks: int, **settings: object) -> list[tuple[dict[int, float], list[int], str, bool]]:
    found = [json.loads(each) for each in run_ranks(ranks, _job, settings)]
    return [({int(k): v for k, v in taken.items()}, skipped, said, stopped) for taken, skipped, said, stopped in found]


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, float]:
    return on_ranks(2)[0][0]


def injected(kind: str) -> dict[str, object]:
    return RERUN | {"error_injection_rate": 3, "error_injection_type": kind}


def test_a_transient_error_does_not_change_the_run(undisturbed: dict[int, float]) -> None:
    (taken, skipped, said, stopped), (others, *_) = on_ranks(2, **injected("transient_error"))
    assert taken == others == undisturbed and not skipped and not stopped
    found = re.findall(r"suspicious result at iteration (\d).*: transient on rank (\d): repeated on the same", said)
    assert found and f"repeated steps: {len(found)} transient" in said


def test_a_persistent_error_ends_the_run_and_names_the_rank(undisturbed: dict[int, float]) -> None:
    found = on_ranks(2, **injected("persistent_error"))
    taken, skipped, said, stopped = found[0]
    assert all(each[3] for each in found) and stopped and skipped == [2]
    assert "iteration 2 (loss nan, gradient norm nan): persistent on rank 1: the same ranks repeat it" in said
    assert "ends early, after iteration 2 (a persistent error on rank 1)" in said
    assert taken == {1: undisturbed[1]}


def test_a_step_that_stays_on_its_ranks_shows_no_persistent_error() -> None:
    """A planted defect, which the verdicts above show."""
    with planted("resilience.rerun:Reruns._validate", "compute(2, shift=1)", "compute(2)"):
        _, _, said, stopped = on_ranks(2, **injected("persistent_error"))[0]
    assert "persistent" not in said and "correct: it is the same" in said and not stopped


def test_a_result_of_the_samples_is_a_bad_step(undisturbed: dict[int, float]) -> None:
    taken, skipped, said, stopped = on_ranks(2, **injected("correct_result"))[0]
    verdicts = re.findall(r"iteration (\d).*: correct: it is the same on the same and on other ranks", said)
    assert verdicts and skipped == [int(each) for each in verdicts] and not stopped
    assert taken.keys() == undisturbed.keys() - set(skipped)


def test_one_copy() -> None:
    losses, said, _ = _trained(injected("persistent_error"))
    assert "correct: repeated on the same ranks it is the same; there is no other copy" in said and losses.skipped
    losses, said, _ = _trained(injected("transient_error"))
    assert "transient on rank 0" in said and not losses.skipped


@pytest.mark.parametrize("layout", [{}, {"zero_stage": 3, "overlap_grad_reduce": True, "overlap_param_gather": True}])
def test_every_step_twice_is_the_same_training(layout: dict, undisturbed: dict[int, float]) -> None:
    taken, _, said, _ = on_ranks(2, rerun_mode="report_stats", **layout)[0]
    assert taken == pytest.approx(undisturbed, rel=1e-12)
    assert "repeated steps: 4 equal; largest relative difference 0" in said


def test_a_flipped_bit_is_transient(undisturbed: dict[int, float]) -> None:
    """NaN in the weights of a rank during one step."""
    taken, skipped, said, _ = on_ranks(2, **RERUN, inject_fault=("nan@1:2",))[0]
    assert taken == undisturbed and not skipped and re.search(r"iteration 2 .*: transient on rank 1", said)


def test_a_replayed_step_is_validated_too() -> None:
    _, skipped, said, stopped = on_ranks(2, **injected("correct_result"), replay_interval=1)[0]
    verdicts = re.findall(r"iteration (\d).*: correct: it is the same on the same and on other ranks", said)
    assert verdicts and skipped == [int(each) for each in verdicts] and not stopped


def test_replayed_steps_change_no_bit(undisturbed: dict[int, float]) -> None:
    taken, skipped, said, _ = on_ranks(2, **RERUN, replay_interval=1)[0]
    assert taken == undisturbed and not skipped
    assert "wrong values" not in said


def test_a_replay_needs_another_copy() -> None:
    config = tiny_config(**SETTINGS | RERUN | {"replay_interval": 2})
    run = SimpleNamespace(config=config, world=World(0, 1, 0, torch.device("cpu")), groups=Groups())
    out = io.StringIO()
    with redirect_stdout(out):
        Reruns(run).before_run()
    assert out.getvalue() == "note: replay_interval=2 has no effect: no other data-parallel replica is left\n"


@pytest.mark.parametrize(
    ("first", "moved", "expected"),
    [
        ((1.0, 2.0, 3.0, 4.0), (1.0, 2.5, 3.5, 4.0), "rank 1"),  # wrong in both attempts
        ((1.0, math.nan, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), "rank 1"),
        ((1.0, 2.0, 3.0, 4.0), (math.nan, 2.0, 3.0, 4.0), "rank 3"),
        ((1.0, 2.0, 3.0, 4.0), (1.0, 2.5, 3.0, 4.0), "one of ranks 0, 1"),
    ],
)
def test_a_replay_names_the_copies_that_may_be_wrong(
    first: tuple[float, ...], moved: tuple[float, ...], expected: str
) -> None:
    groups = SimpleNamespace(grid=Grid(dp=4), size=Grid(dp=4).size)
    run = SimpleNamespace(
        config=tiny_config(**RERUN), world=World(0, 4, 0, torch.device("cpu")), groups=groups,
        state=SimpleNamespace(iteration=6),
    )  # fmt: skip
    with pytest.raises(WrongStepError, match=f"^{expected} computed wrong values in step 7") as caught:
        Reruns(run)._compare(*(Attempt(None, losses, dict) for losses in (first, moved)))
    assert caught.value.ranks == ((int(expected[-1]),) if expected.startswith("rank") else ())


class Groups:
    """Two ranks of one data-parallel copy, which were others in the launcher."""

    grid = Grid(tp=2)

    def size(self, axis: str) -> int:
        """The size of an axis."""
        return self.grid.size(axis)


def test_copies_are_named_by_the_ranks_of_the_launcher() -> None:
    world = World(0, 2, 0, torch.device("cpu"), launched=(3, 5))
    run = SimpleNamespace(config=tiny_config(**RERUN), world=world, groups=Groups())
    assert Reruns(run)._members([0]) == [3, 5]


def test_experts_and_a_pipeline() -> None:
    settings = {"num_experts": 2, "disable_bias_linear": True, "num_layers": 2, "expert_model_parallel_size": 2}
    settings |= {"pipeline_model_parallel_size": 2, "global_batch_size": 4}
    plain = on_ranks(4, **settings, train_iters=1)[0][0]
    taken, skipped, said, stopped = on_ranks(4, **settings, **injected("persistent_error"))[0]
    assert "persistent on ranks 1, 3:" in said and stopped and skipped == [2] and taken == {1: plain[1]}


def test_an_overflow_of_float16_is_not_suspicious() -> None:
    overflow = {"fp64": False, "fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1, "train_iters": 2}
    losses, said, _ = _trained(RERUN | overflow)
    assert losses.skipped == [1, 2] and "suspicious" not in said


def test_settings_that_need_each_other() -> None:
    found = list(problems(tiny_config(error_injection_rate=5), 1))
    assert len(found) == 1 and "error_injection_rate=5" in found[0] and "--rerun-mode validate_results" in found[0]
    found = list(problems(tiny_config(**RERUN, error_injection_type="correct_result"), 1))
    assert len(found) == 1 and "--error-injection-rate N" in found[0]
