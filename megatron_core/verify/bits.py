"""Compare the bits of layouts: each must give the hashes of one process in the same dtype."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Protocol

from megatron_core.cpu_ranks.shared_memory import backend as shared_memory
from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import listed
from megatron_core.planner.layout import Layout
from megatron_core.reports.hash_records import HashDifference, HashRecord, first_hash_difference
from megatron_core.verify.bounds import EPSILON
from megatron_core.verify.parity import reference_of
from megatron_core.verify.ranks import RankFailure, run_ranks, run_simulated


class HashedExperiment(Protocol):
    """A training whose steps can be hashed under any layout."""

    def hashes(self, layout: Layout, dtype: str) -> list[HashRecord]:
        """Train as one rank of a world of ``layout.world_size`` ranks; return the records of all steps, by tensor."""
        ...


@dataclass(frozen=True)
class BitsRow:
    """Result of one layout."""

    layout: str
    ranks: int
    seconds: float
    difference: HashDifference | None = None
    """The first difference from one process."""
    faults: tuple[str, ...] = ()
    """Further reasons why the layout fails: an error of a rank, or copies that differ."""

    @property
    def holds(self) -> bool:
        """Whether all bits are those of one process."""
        return self.difference is None and not self.faults

    @property
    def verdict(self) -> str:
        """The result as a sentence."""
        reasons = [*(() if self.difference is None else (str(self.difference),)), *self.faults]
        return "equal bits" if self.holds else "; ".join(reasons)


@dataclass(frozen=True)
class BitsReport:
    """Results of all layouts."""

    dtype: str
    backend: str
    steps: int
    rows: list[BitsRow] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all layouts have the bits of one process; False without rows."""
        return bool(self.rows) and all(row.holds for row in self.rows)

    @property
    def summary(self) -> str:
        """One line with the number of layouts that have the bits of one process."""
        equal = sum(row.holds for row in self.rows)
        return f"{equal} of {len(self.rows)} layouts have the bits of one process in {self.dtype} over {self.backend}"

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        rows = [asdict(row) | {"holds": row.holds, "verdict": row.verdict} for row in self.rows]
        return {**asdict(self), "holds": self.holds, "rows": rows}


def check_bits(
    experiment: HashedExperiment,
    layouts: Iterable[Layout | str],
    *,
    dtype: str = "float32",
    device: str = "cpu",
    backend: str = "auto",
    on_row: Callable[[BitsRow], None] = lambda row: None,
    timeout: float = 300.0,
) -> BitsReport:
    """Run ``experiment`` in one process and under each of ``layouts``, and compare losses, norms and hashes.

    The arguments are those of ``check_parity``. A layout that fails to run gives a row with faults.
    Errors: ``RankFailure`` if the experiment fails in one process; ``ConfigError`` if a loss there is not finite.
    """
    if dtype not in EPSILON:
        raise ConfigError(f"dtype={dtype} cannot be compared; legal: {', '.join(EPSILON)}")
    wanted = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]

    def results(experiment: HashedExperiment, layout: Layout) -> tuple[list[HashRecord], list[str]]:
        if device == "simulated" and layout.world_size > 1:
            return run_simulated(
                layout.world_size, experiment.hashes, layout, dtype, finish=_joined, layout=layout
            ).result
        return _joined(
            run_ranks(
                layout.world_size, experiment.hashes, layout, dtype, timeout=timeout, device=device, backend=backend
            )
        )

    rows: list[BitsRow] = []
    baselines: list[tuple[HashedExperiment, list[HashRecord]]] = []
    for layout in wanted:
        began = time.perf_counter()
        difference = None
        reference = reference_of(experiment, layout)
        baseline = next((records for known, records in baselines if known == reference), None)
        if baseline is None:
            baseline, _ = results(reference, Layout())
            _losses(baseline)
            baselines.append((reference, baseline))
        try:
            computed, faults = results(experiment, layout)
        except RankFailure as failure:
            faults = [f"fails: {str(failure).strip().splitlines()[-1]}"]
        else:
            difference = first_hash_difference(baseline, computed)
            ours, theirs = ([record.iteration for record in records] for records in (computed, baseline))
            if ours != theirs:
                faults.append(f"has records of the iterations {listed(ours)} instead of {listed(theirs)}")
        rows.append(BitsRow(str(layout), layout.world_size, time.perf_counter() - began, difference, tuple(faults)))
        on_row(rows[-1])
    names = {"cpu": shared_memory.expected(backend), "cuda": "nccl", "simulated": "simulated ranks"}
    return BitsReport(dtype, names[device], len(_losses(baselines[0][1])) if baselines else 0, rows)


def _losses(records: Sequence[HashRecord]) -> list[float]:
    """The loss of each step in one process; ConfigError if one is not finite."""
    losses = [record.loss for record in records if record.loss is not None]
    if not losses or not all(map(isfinite, losses)):
        raise ConfigError(f"in one process the losses are {losses}, which are not finite and cannot be compared")
    return losses


def _joined(by_rank: Sequence[list[HashRecord]]) -> tuple[list[HashRecord], list[str]]:
    """The records of all ranks -> those of rank 0, and inconsistencies between ranks."""
    first = by_rank[0]
    faults = []
    for rank, records in enumerate(by_rank):
        if (differs := first_hash_difference(first, records)) is not None:
            faults.append(f"rank {rank} and rank 0 report different results ({differs})")
    for record in first:
        if record.differing_copies:
            names = listed(record.differing_copies, 4)
            return first, [*faults, f"iteration {record.iteration}: copies on several ranks differ: {names}"]
    return first, faults
