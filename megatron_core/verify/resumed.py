"""A training on token files that is interrupted: its first steps in one layout, the others in another one."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.cpu_ranks.shared_memory import backend as shared_memory
from megatron_core.datasets.indexed import get_bin_path, get_idx_path
from megatron_core.datasets.keyed_dataset import mix64
from megatron_core.planner.layout import Layout
from megatron_core.preprocess.builder import IndexedDatasetBuilder
from megatron_core.training.step import train_step
from megatron_core.verify.comparison import Task
from megatron_core.verify.gpt import GPTExperiment, prepared, train_traced
from megatron_core.verify.parity import ParityReport, Row, check_parity
from megatron_core.verify.ranks import RankFailure, run_ranks
from megatron_core.verify.shrink import STEPS, VOCABULARY
from megatron_core.verify.trace import RankTrace

BEFORE = 4
"""Steps before the checkpoint: within the warm-up and the decay of the short schedules, and after a batch ramp."""
DOCUMENTS = 80


@dataclass(frozen=True)
class ResumedTraining:
    """Steps ``BEFORE`` to ``STEPS`` of a training on token files: after the steps before them, or from a checkpoint."""

    experiment: GPTExperiment
    """The whole training; its configuration reads files."""
    checkpoints: str = ""
    """Folder of the checkpoint after ``BEFORE`` steps; empty: train them."""

    def __call__(self, layout: Layout, dtype: str) -> RankTrace:
        """Train, and return this rank's trace of the steps after the checkpoint."""
        config = self.experiment.configured(layout, dtype)
        if self.checkpoints:
            config = RunConfig.from_flat(config.flat() | {"load": self.checkpoints})
        first = 0 if self.checkpoints else BEFORE
        return train_traced(config, STEPS - BEFORE, untraced=first, thorough=True)

    def save(self, layout: Layout, dtype: str) -> None:
        """Train the steps before the checkpoint, and write it."""
        config = self.experiment.configured(layout, dtype)
        run = prepared(RunConfig.from_flat(config.flat() | {"save": self.checkpoints}))
        for _ in range(BEFORE):
            train_step(run)
        run.saver.save(run.state)
        run.saver.close()

    def reference(self, layout: Layout) -> "ResumedTraining":
        """The training of one process without an interruption."""
        return ResumedTraining(self.experiment.reference(layout))


def why_not_resumed(task: Task, device: str) -> str:
    """The reason why the trainings of ``check_resumed`` are not possible; empty if they are."""
    if task.config.num_groups > 1:
        return f"outer_groups={task.config.num_groups} are compared without checkpoints"
    return "" if device == "cpu" else f"they need processes on CPUs (--device cpu), not {device}"


def check_resumed(
    experiment: GPTExperiment, layouts: Sequence[Layout], *, backend: str, on_row: Callable[[Row], None]
) -> ParityReport:
    """Compare trainings on token files with one process in float64, for each layout: without an interruption, resumed
    from a checkpoint of one process, and one process resumed from a checkpoint of the layout.

    The rows are named after both layouts. A layout that cannot write a checkpoint gives a row with a fault.
    """
    report = ParityReport("float64", shared_memory.expected(backend))
    with tempfile.TemporaryDirectory() as folder:
        on_files = replace(experiment, config=reading_files(experiment.config, Path(folder)), thorough=True)
        for number, layout in enumerate(layouts):
            for name, saved_in, resumed_in in _cases(layout):
                training = ResumedTraining(on_files, str(Path(folder) / f"{number} {name}") if saved_in else "")
                if saved_in and (fault := _saving_fault(training, saved_in, backend)):
                    rows = [Row(str(layout), layout.world_size, 0.0, faults=(fault,))]
                else:
                    # One process resumes with the batches of the layout, as its reference does.
                    alone = resumed_in.world_size == 1
                    resumed = replace(training, experiment=on_files.reference(layout)) if alone else training
                    rows = check_parity(resumed, [resumed_in], backend=backend).rows
                report = replace(report, rows=[*report.rows, replace(rows[-1], layout=name)])
                on_row(report.rows[-1])
    return report


def _cases(layout: Layout) -> Iterator[tuple[str, Layout | None, Layout]]:
    """Name, layout of the checkpoint and layout after it."""
    yield f"{layout} on files", None, layout
    yield f"{layout} from 1 process", Layout(), layout
    yield f"1 process from {layout}", layout, Layout()


def _saving_fault(training: ResumedTraining, layout: Layout, backend: str) -> str:
    try:
        run_ranks(layout.world_size, training.save, layout, "float64", timeout=300.0, backend=backend)
    except RankFailure as failure:
        return f"saving fails: {str(failure).strip().splitlines()[-1]}"
    return ""


def reading_files(config: RunConfig, folder: Path) -> RunConfig:
    """Write token files of random documents, and return ``config`` with a training on them."""
    prefix = str(folder / "tokens")
    lengths = [1 + mix64(11, number) % (4 * config.data.seq_length) for number in range(DOCUMENTS)]
    with IndexedDatasetBuilder(get_bin_path(prefix), np.int32) as builder:
        for number, length in enumerate(lengths):
            builder.add_document([mix64(12, number, i) % VOCABULARY for i in range(length)], [length])
        builder.finalize(get_idx_path(prefix))
    files: dict[str, Any] = {"mock_data": False, "data_path": (prefix,), "split": "8,1,1"}
    return RunConfig.from_flat(config.flat() | files)
