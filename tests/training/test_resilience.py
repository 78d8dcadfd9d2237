"""Handling of bad steps, injected faults and repeated failures, in forked ranks."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_core.checkpoint import find_checkpoint
from megatron_core.checkpoint.folder import complete_iterations
from megatron_core.commands import replay_step
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.monitor.events import StepEvent
from megatron_core.reports.metrics import read_run
from megatron_core.resilience import faults
from megatron_core.resilience.bad_steps import BadSteps
from megatron_core.resilience.failure_log import FILE
from megatron_core.resilience.faults import Faults, InjectedError
from megatron_core.training.loop import train
from megatron_core.training.setup import Run
from megatron_core.training.state import weight_pieces
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_config, tiny_run

SETTINGS = {
    "num_layers": 1,
    "hidden_size": 16,
    "seq_length": 8,
    "vocab_size": 29,
    "global_batch_size": 4,
    "train_iters": 6,
    "eval_iters": 0,
    "save_interval": 2,
    "fp64": True,
}


class Losses:
    """A sink that stores the loss of every completed step."""

    def __init__(self, action: Callable[[StepEvent], object] = lambda event: None) -> None:
        self.taken: dict[int, float] = {}
        self.skipped: list[int] = []
        self.action = action

    def on_step(self, event: StepEvent) -> None:
        self.action(event)
        if event.skipped:
            self.skipped.append(event.iteration)
        else:
            self.taken[event.iteration] = event.loss


def weights(run: Run) -> list[np.ndarray]:
    """All weights of this rank's shards."""
    run.data_parallel.finish_param_sync()
    return [p.memory.numpy().copy() for bucket in run.data_parallel.buckets for p in weight_pieces(bucket)]


def _spoil_once(run: Run, at: int) -> Losses:
    """NaN in the weights of the last rank after step ``at``, once, like a flipped bit or a wrong kernel."""
    done: list[int] = []

    def spoil(event: StepEvent) -> None:
        if event.iteration == at and not done:
            done.append(at)
            run.data_parallel.finish_param_sync()
            run.data_parallel.buckets[-1].weight_shard.fill_(math.nan)

    return Losses(spoil)


def _spoiled_weights(layout: dict, root: Path) -> tuple:
    """NaN in the weights after step 3 remains in all following steps until the checkpoint of step 2 is loaded."""
    run = tiny_run(**SETTINGS | layout, save=str(root), max_bad_steps=1)
    sink = _spoil_once(run, 3)
    mine = dist.get_rank() == dist.get_world_size() - 1
    train(run, [sink if mine else Losses()])
    by_number = tiny_run(**SETTINGS | layout | {"iterations_to_skip": (4, 5), "save_interval": None})
    train(by_number, [])
    for found, expected in zip(weights(run), weights(by_number), strict=True):
        np.testing.assert_array_equal(found, expected)
    return (
        run.state.iteration,
        run.state.left_out,
        run.state.rollbacks,
        run.state.skipped_iterations,
        sink.skipped * mine,
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "layout", [{"zero_stage": 1, "overlap_param_gather": True}, {"tensor_model_parallel_size": 2}, {"zero_stage": 3}]
)
def test_after_bad_steps_in_a_row_a_run_goes_back_and_leaves_their_batches_out(layout: dict, tmp_path: Path) -> None:
    first, second = run_ranks(2, _spoiled_weights, layout, tmp_path)
    assert first[:4] == second[:4] == (6, [4, 5], 1, 2)
    assert second[4] == [4, 5]


def _injected_nan(root: Path, rank: int) -> tuple:
    run = tiny_run(**SETTINGS, save=str(root), max_bad_steps=1, inject_fault=(f"nan@{rank}:3",))
    sink = Losses()
    train(run, [sink])
    return sorted(sink.taken), sink.skipped, run.state.rollbacks, all(np.isfinite(w).all() for w in weights(run))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_bad_step_is_skipped_alike_on_all_ranks(rank: int, tmp_path: Path) -> None:
    assert run_ranks(2, _injected_nan, tmp_path, rank) == [([1, 2, 4, 5, 6], [3], 0, True)] * 2
    assert (tmp_path / "bad_steps" / "iter_0000002" / "manifest.json").is_file()


def test_a_bad_step_is_replayed_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # C57
    """NaN that remains in the weights is reported; a fault of a single step, such as an injected one, is not."""
    run_ranks(2, _spoiled_weights, {"tensor_model_parallel_size": 2}, tmp_path / "weights")
    assert replay_step.main([str(tmp_path / "weights/bad_steps/iter_0000003")]) == 1
    output = capsys.readouterr().out
    assert "iteration 4, samples 12 to 15\nloss nan" in output
    assert "weights that are not finite: embedding.word_embeddings.weight" in output
    run_ranks(2, _injected_nan, tmp_path / "step", 1)
    assert replay_step.main([str(tmp_path / "step/bad_steps/iter_0000002")]) == 0
    assert "the first module whose output is not finite: none" in capsys.readouterr().out


def _bounded(root: Path) -> str:
    nans = tuple(f"nan@0:{step}" for step in range(3, 7))
    run = tiny_run(**SETTINGS, save=str(root), max_bad_steps=1, max_rollbacks=1, inject_fault=nans)
    with pytest.raises(MegatronError) as error:
        train(run, [])
    return str(error.value)


def test_going_back_is_bounded(tmp_path: Path) -> None:
    (text,) = run_ranks(1, _bounded, tmp_path)
    assert "after 1 rollbacks to a checkpoint" in text
    assert find_checkpoint(str(tmp_path)).name == "iter_0000002"


def test_spikes_are_bad_steps() -> None:
    run = tiny_run(**SETTINGS, max_bad_steps=2, spike_factor=3.0)
    bad = BadSteps(run)
    bad._norms.extend([1.0, 1.1, 0.9] * 3)
    assert [bad.is_bad(2.0, norm) for norm in (1.0, 2.9, 3.1, 100.0)] == [False, False, True, True]
    assert bad.is_bad(math.nan, 1.0)
    assert not BadSteps(run).is_bad(2.0, 100.0), "nothing to compare with yet"


def test_half_precision_that_is_not_finite_from_the_start_ends_the_run(tmp_path: Path) -> None:
    """The loss scale halves a few times; at its minimum the run ends without saving."""
    settings = SETTINGS | {"fp64": False, "fp16": True, "initial_loss_scale": 4.0, "hysteresis": 1, "train_iters": 20}
    run = tiny_run(**settings, save=str(tmp_path), inject_fault=("nan@0:1",))
    with pytest.raises(MegatronError, match="the loss is nan with the loss scale 4 at iteration 1"):
        train(run, [])
    assert find_checkpoint(str(tmp_path)) is None


def _fail_always(root: Path, fault: str) -> list[str]:
    """Four attempts, as of a launcher; returns each one's error."""
    found = []
    for _ in range(4):
        run = tiny_run(**SETTINGS, save=str(root), load=str(root), inject_fault=(fault,))
        with pytest.raises((MegatronError, InjectedError)) as error:
            train(run, [])
        found.append(f"{type(error.value).__name__} {error.value}")
        dist.barrier()
    return found


@pytest.mark.parametrize("kind", ["exception", "nan"])
def test_the_same_failure_twice_is_not_tried_again(kind: str, tmp_path: Path) -> None:
    """The second and every later attempt end with the fix; other settings start a new count."""
    fault = f"{kind}@0:4:always"
    (tmp_path / "run").mkdir()
    (texts,) = run_ranks(1, _fail_always, tmp_path / "run", fault)
    assert "the same failure twice" not in texts[0]
    for text in texts[1:]:
        assert text.startswith("MegatronError the same failure twice in iteration 4")
        assert str(tmp_path / "run" / FILE) in text
    run = tiny_run(**SETTINGS, save=str(tmp_path / "run"), load=str(tmp_path / "run"))
    train(run, [])
    assert run.state.iteration == 6


def test_a_failure_log_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"iteration": 1, "error": "x"}) + '\n{"iterat\n[1]\n{"iteration": []}\n')
    train(tiny_run(**SETTINGS, save=str(tmp_path)), [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inject_fault": ("explode@0:1",)}, "KIND@RANK:STEP"),
        ({"inject_fault": ("kill@0:" + "9" * 300,)}, "KIND@RANK:STEP"),
        ({"spike_factor": 3.0}, "--max-bad-steps"),
        ({"spike_factor": math.nan, "max_bad_steps": 1}, "spike_factor=nan"),
        ({"max_bad_steps": 1, "check_for_nan_in_loss_and_grad": False}, "exclude one another"),
        ({"max_rollbacks": -1}, "an integer >= 0"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check(tiny_config(**settings), 1)
    assert len(str(error.value)) < 500


# --- Injected faults and their handling. Faults that end a process: tests/end_to_end.


def _with_fault(root: Path, fault: str) -> tuple[list[float], str, list[float]]:
    """Milliseconds of each step, the output of rank 0, and all weights, of a run of two ranks with a fault."""
    faults.SLOW_SECONDS = 0.5
    seen: list[float] = []
    with redirect_stdout(io.StringIO()) as printed:
        run = tiny_run(**SETTINGS, save=str(root), load=str(root), inject_fault=(fault,) * bool(fault))
        run.saver.open()
        train(run, [Losses(lambda event: seen.append(event.elapsed_ms))])
    return seen, printed.getvalue(), np.concatenate([w.ravel() for w in weights(run)]).tolist()


def test_a_slow_step_is_waited_for(tmp_path: Path) -> None:
    plain, slow = (run_ranks(2, _with_fault, tmp_path / f"run{fault}", fault) for fault in ("", "slow@1:3"))
    for (_, _, expected), (seen, _, found) in zip(plain, slow, strict=True):
        assert seen[2] >= 500 and found == expected


def test_a_clock_that_is_set_back_changes_nothing(tmp_path: Path) -> None:
    """Neither results nor times: the records of a run are in order, although its clock is not."""
    plain, moved = (run_ranks(2, _with_fault, tmp_path / f"run{fault}", fault) for fault in ("", "clock@1:3"))
    assert [found for _, _, found in moved] == [expected for _, _, expected in plain]
    records = read_run(tmp_path / "runclock@1:3")
    for lines in records.ranks.values():
        times = [line["at"] for line in lines if line["kind"] == "times"]
        assert len(times) > 3, times
        assert times == sorted(times) and times[-1] - times[0] < 600


def test_a_slow_disk_is_waited_for(tmp_path: Path) -> None:
    plain, slow = (run_ranks(2, _with_fault, tmp_path / f"run{fault}", fault) for fault in ("", "disk-slow@1:4"))
    assert [found for _, _, found in slow] == [expected for _, _, expected in plain]
    lines = read_run(tmp_path / "rundisk-slow@1:4").ranks[1]
    saving = {line["last"]: line["phases"].get("checkpoint", 0.0) for line in lines if line["kind"] == "times"}
    assert max(saving.values()) >= 0.5, saving
    assert complete_iterations(tmp_path / "rundisk-slow@1:4") == [2, 4, 6]


def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    (_, told, _), _ = run_ranks(2, _with_fault, tmp_path, "disk-full@1:4")
    assert "saving failed: a rank could not write its tensors" in told
    assert complete_iterations(tmp_path) == [2, 6] and not list(tmp_path.glob(".iter_*"))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["truncated-write", "flip-bit"])
def test_damage_is_found_on_the_next_start(kind: str, tmp_path: Path) -> None:  # C58
    """The last checkpoint is silently damaged: the next run reports it and resumes bitwise from the previous one."""
    plain = run_ranks(2, _with_fault, tmp_path / "plain", "")
    run_ranks(2, _with_fault, tmp_path / "run", f"{kind}@1:6")
    seen = run_ranks(2, _with_fault, tmp_path / "run", "")
    assert [found for _, _, found in seen] == [expected for _, _, expected in plain]
    assert len(seen[0][0]) == 2, "steps 5 and 6"
    assert "skipped a damaged checkpoint" in seen[0][1] and "rank_00001.safetensors" in seen[0][1]


def test_faults_of_one_step_all_happen_and_others_are_named(capsys: pytest.CaptureFixture) -> None:
    faults = ("nan@0:2", "nan@0:2:always", "exception@0:2", "kill@0:99", "flip-bit@0:1", "kill@3:1")
    run = tiny_run(**SETTINGS, inject_fault=faults)
    injected, weights = Faults(run), run.data_parallel.buckets[-1].weight_shard
    injected.before_step()
    assert not weights.isnan().any()
    run.state.iteration = 1
    with pytest.raises(InjectedError):
        injected.before_step()
    told = capsys.readouterr().err
    assert told.count("injected fault: nan in step 2") == told.count("injected fault: exception in step 2") == 1
    assert weights.isnan().all()
    injected.before_update()
    assert not weights.isnan().any()
    injected.after_run()
    told = capsys.readouterr().err
    assert re.findall(r"inject_fault=(\S+) has not happened", told) == ["kill@0:99", "flip-bit@0:1", "kill@3:1"]


def test_a_hang_that_no_rank_would_notice_is_refused() -> None:
    with pytest.raises(ConfigError, match="hang@0:2: a hang would never end on one rank"):
        Faults(tiny_run(**SETTINGS, inject_fault=("hang@0:2",)))
