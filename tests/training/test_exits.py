"""Any end of a run leaves a checkpoint that can be resumed, and the resumed run equals an uninterrupted one."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_core.checkpoint import find_checkpoint
from megatron_core.errors import MegatronError
from megatron_core.monitor.events import StepEvent
from megatron_core.training.loop import train
from megatron_core.training.setup import Run
from megatron_core.training.state import optimizer_pieces
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

SETTINGS = {
    "num_layers": 1,
    "hidden_size": 16,
    "seq_length": 8,
    "vocab_size": 29,
    "hidden_dropout": 0.1,
    "global_batch_size": 4,
    "train_iters": 6,
    "eval_iters": 0,
    "lr_warmup_iters": 2,
}
# Ways to end a run, and the iteration of its last checkpoint.
EXITS: dict[str, tuple[dict, int]] = {
    "the end": ({}, 6),
    "exit_interval": ({"exit_interval": 4}, 4),
    "exit_duration": ({"exit_duration_in_mins": 1e-9}, 1),
    "SIGTERM": ({}, 3),
    "SIGINT": ({}, 3),
    "nan": ({"save_interval": 2}, 2),
}


class After:
    """A sink that runs an action once, after an iteration and before its checkpoint."""

    def __init__(self, iteration: int, action: Callable[[], object]) -> None:
        self.iteration, self.action = iteration, action

    def on_step(self, event: StepEvent) -> None:
        if event.iteration == self.iteration:
            self.action()


def _end(run: Run, how: str) -> None:
    """Train until the run ends in the given way; events on one rank must affect all ranks."""
    mine = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    if how == "nan":
        weight = next(iter(run.stages.values())).decoder.layers["0"].mlp.linear_fc1.weight

        def spoil() -> None:
            run.data_parallel.finish_param_sync()  # or a pending gather fills the weight again
            weight.data.fill_(math.nan)

        with pytest.raises(MegatronError, match="at iteration 4"):
            train(run, [After(3, spoil)])
    elif how.startswith("SIG"):
        train(run, [After(2, lambda: signal.raise_signal(signal.Signals[how]))] if mine else [])
    else:
        train(run, [])


def _content(run: Run) -> dict[str, np.ndarray]:
    run.data_parallel.finish_param_sync()
    named = [(n, p) for stage in run.stages.values() for n, p in stage.named_global_parameters()]
    weights = {name: parameter.detach().numpy().copy() for name, parameter in named}
    moments = {f"{p.name} {p.box}": p.memory.numpy().copy() for p in optimizer_pieces(run.optimizer)}
    return weights | moments


def _stop_and_resume(how: str, layout: dict, root: Path) -> int:
    whole = tiny_run(**SETTINGS | layout)
    train(whole, [])
    ending, last = EXITS[how]
    run = tiny_run(**SETTINGS | layout | ending, save=str(root))
    _end(run, how)
    assert find_checkpoint(str(root)).name == f"iter_{last:07d}"
    resumed = tiny_run(**SETTINGS | layout, load=str(root))
    assert (resumed.state.iteration, resumed.state.consumed_samples) == (last, 4 * last)
    train(resumed, [])
    expected, found = _content(whole), _content(resumed)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    return resumed.state.iteration


@pytest.mark.parametrize("how", EXITS)
def test_every_exit_can_be_resumed(how: str, tmp_path: Path) -> None:  # C57
    assert run_ranks(1, _stop_and_resume, how, {}, tmp_path) == [6]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("how", ["SIGTERM", "exit_duration", "nan"])
@pytest.mark.parametrize(
    "layout", [{"use_distributed_optimizer": True, "overlap_param_gather": True}, {"tensor_model_parallel_size": 2}]
)
def test_two_ranks_end_together(how: str, layout: dict, tmp_path: Path) -> None:  # C57
    """Only the last rank receives the signal."""
    assert run_ranks(2, _stop_and_resume, how, layout, tmp_path) == [6, 6]
