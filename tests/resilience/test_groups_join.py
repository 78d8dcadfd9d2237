"""Groups of replicas that are lost and join again, with real processes, compared with one process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.optimizer.rule import write_copy
from megatron_core.planner.layout import Layout
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run
from megatron_core.verify.groups import GroupsInOneProcess
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import start, stored
from tests.end_to_end.test_failures import ranks_without_launcher
from tests.memory import needs_proc
from tests.programs import free_port
from tests.resilience.test_recovered_jobs import GROUPS, JOB, SECONDS, STREAMS, await_text
from tests.runs import tiny_config

pytestmark = needs_proc
STEPS, LOST = 30, 5
"""Steps of the jobs, and the step in which ranks are killed."""


class Reference(GroupsInOneProcess):
    """Groups of which some are lost, and others join."""

    def __init__(self, config: RunConfig, groups: int) -> None:
        self._job = config.with_section(replace(config.section(OuterConfig), outer_groups=groups))
        samples = start(config.with_section(OuterConfig()).flat()).train_loader.dataset

        def prepare(alone: RunConfig) -> Run:
            run = start(alone.flat())
            run.train_loader.dataset = samples  # in the order of the whole job
            return run

        super().__init__(self._job, prepare)

    def train(self, until: int) -> None:
        """Take the steps up to ``until``."""
        while self._steps < until:
            self.step(lambda group: StepHooks())

    def regrouped(self, kept: Sequence[int], donors: Sequence[int | None]) -> Reference:
        """The groups ``kept`` in this order, each of which continues, or begins with the global weights and the
        optimizer state of its donor."""
        later, steps = Reference(self._job, len(kept)), self._steps
        later.weights, later.momentum, later._steps = dict(self.weights), dict(self.momentum), steps
        for run, own, donor in zip(later.runs, kept, donors, strict=True):
            source = self.runs[own if donor is None else donor]
            for shard, other in zip(run.optimizer.shards, source.optimizer.shards, strict=True):
                for name, tensor in (shard.state | {"main": shard.main}).items():
                    tensor.copy_((other.state | {"main": other.main})[name])
                for name, parameter, _, _, at in shard.bucket.pieces() if donor is not None else ():
                    shard.main[at : at + parameter.numel()] = self.weights[name]
                write_copy(shard.whole)
            run.optimizer.set_steps_taken(source.optimizer.steps_taken)
            batch = run.config.training.global_batch_size
            run.state = replace(source.state, consumed_samples=steps * batch)
        for name, (due, sent) in self._in_flight.items():
            zero = torch.zeros_like(sent[0])  # a group that begins has not moved away from the global weights
            kept_and_new = zip(kept, donors, strict=True)
            later._in_flight[name] = due, [sent[own] if donor is None else zero for own, donor in kept_and_new]
        return later

    def state(self) -> dict[str, np.ndarray]:
        """Global weights, their momentum, and weights and optimizer state of each group, flat, named as in a
        checkpoint."""
        found = {f"model.{name}": weight for name, weight in self.weights.items()}
        found |= {f"outer.momentum.{name}": momentum for name, momentum in self.momentum.items()}
        for number, run in enumerate(self.runs):
            found |= {f"group{number}.model.{name}": main for name, main in self._mains(run)}
            for shard in run.optimizer.shards:
                for kind, flat in shard.state.items():
                    for name, parameter, _, _, at in shard.bucket.pieces():
                        found[f"group{number}.optimizer.{kind}.{name}"] = flat[at : at + parameter.numel()]
        return {name: value.numpy() for name, value in found.items()}


def expected_state(config: RunConfig, lost: int, joined: int) -> dict[str, np.ndarray]:
    """The end of a job of two groups, of which the second is lost in step ``lost`` and joins after step ``joined``."""
    groups = Reference(config, 2)
    groups.train(lost - 1)
    groups = groups.regrouped([0], [None])
    groups.train(joined)
    groups = groups.regrouped([0, 1], [None, 0])
    groups.train(config.training.train_iters or 0)
    return groups.state()


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> None:
    """``found`` are the tensors of ``expected``, to 1e-9; without the padding of the vocabulary."""
    for name, value in expected.items():
        rows = found[name].flatten().numpy()
        np.testing.assert_allclose(rows, value[: len(rows)], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp2", GROUPS | {"outer_steps": 3}),
        pytest.param("dp2", STREAMS | {"outer_steps": 4, "outer_delay": 3}, marks=pytest.mark.whole_matrix),
        pytest.param("tp2 dp2", GROUPS, marks=pytest.mark.whole_matrix),
    ],
)
def test_a_lost_group_joins_again(layout: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The mean is over the other group while it is lost, and over both from the step in which it joins."""
    size, port, log = Layout.parse(layout).world_size, free_port(), tmp_path / "log0"
    job = JOB | Layout.parse(layout).settings() | settings
    job |= {"recover": "in-process", "recover_without_spare": True, "train_iters": STEPS, "save_interval": STEPS}
    folder = {"save": str(tmp_path / "save"), "port": port}
    logs = [log, *(tmp_path / f"log{rank}" for rank in range(1, size))]
    faults = tuple(f"kill@{rank}:{LOST}" for rank in range(size // 2, size))
    with ranks_without_launcher(logs, inject_fault=faults, **job, **folder) as ranks:
        await_text(log, f"without group 1 of 2; training continues after iteration {LOST - 1}")
        again = [*logs[: size // 2], *(tmp_path / f"again{rank}" for rank in range(size // 2, size))]
        with ranks_without_launcher(again, first=size // 2, recover_join=True, **job, **folder) as late:
            for rank in (*ranks[: size // 2], *late):
                rank.join(SECONDS)
                assert rank.exitcode == 0, "".join(each.read_text() for each in {*logs, *again})
    words = rf"joins: {size} of {size} ranks continue after iteration (\d+); group 1 starts with the global weights"
    joined = re.findall(words, log.read_text())
    assert len(joined) == 1, log.read_text()
    config = tiny_config(**JOB | settings | {"train_iters": STEPS})
    (expected,) = run_ranks(1, expected_state, config, LOST, int(joined[0]))
    found = stored(tmp_path / "save" / f"iter_{STEPS:07d}")
    assert len(found) >= len(expected) and int(joined[0]) < STEPS - 4
    assert_close(found, expected)
