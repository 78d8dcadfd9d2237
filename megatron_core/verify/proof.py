"""The proof: an experiment under many layouts against the same experiment in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron_core.config.layout import Layout
from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import listed
from megatron_core.verify.compare import (
    EPSILON,
    FLOAT64_BOUND,
    NOISE_FACTOR,
    Bounds,
    Errors,
    beyond,
    relative_errors,
)
from megatron_core.verify.ranks import RankFailure, run_ranks
from megatron_core.verify.record import Record, Trace, assemble


class Experiment(Protocol):
    """A training that may be run under any layout."""

    def __call__(self, layout: Layout, dtype: str) -> Record:
        """Train in a world of ``layout.world_size`` ranks, of which this process is one, and return its record.

        Weights, batches and everything random must be functions of names and numbers that no layout changes.
        """
        ...


@dataclass(frozen=True)
class Worst:
    """The largest relative error among quantities of a kind, and where it is."""

    error: float
    where: str


@dataclass(frozen=True)
class Row:
    """What became of one layout."""

    layout: str
    ranks: int
    seconds: float
    loss: Worst | None = None
    gradient: Worst | None = None
    norm: Worst | None = None
    weight: Worst | None = None
    faults: tuple[str, ...] = ()
    """Why the layout does not hold; empty if it does."""

    @property
    def holds(self) -> bool:
        """Whether the layout computes what one process computes."""
        return not self.faults


@dataclass(frozen=True)
class Proof:
    """The rows of all layouts."""

    dtype: str
    backend: str
    rows: list[Row] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all layouts hold; False if there is none."""
        return bool(self.rows) and all(row.holds for row in self.rows)

    @property
    def bound(self) -> str:
        """The rule that was applied, in words."""
        if self.dtype == "float64":
            return f"relative errors against one process; at most {FLOAT64_BOUND:.0e} each"
        return (
            f"relative errors against one process in float64; each at most {NOISE_FACTOR:g} times that of one process "
            f"in {self.dtype}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The proof as JSON has it."""
        return {
            "dtype": self.dtype,
            "epsilon": EPSILON[self.dtype],
            "backend": self.backend,
            "bound": self.bound,
            "holds": self.holds,
            "rows": [asdict(row) | {"holds": row.holds} for row in self.rows],
        }


def prove(
    experiment: Experiment,
    layouts: Iterable[Layout | str],
    *,
    dtype: str = "float64",
    device: str = "cpu",
    on_row: Callable[[Row], None] = lambda row: None,
    timeout: float = 300.0,
) -> Proof:
    """Run ``experiment`` in one process and under each of ``layouts``, and compare.

    ``dtype`` is float64, float32 or bfloat16; ``device`` cpu (gloo) or cuda (NCCL, a GPU for each rank). ``on_row``
    hears of each row when it is there. A layout that fails to run is a row that does not hold.
    Errors: ``RankFailure`` if one process cannot run the experiment; ``ConfigError`` if what it does there would prove
    nothing: a loss that is not finite, or a parameter whose gradients are all 0.
    """
    if dtype not in EPSILON:
        raise ConfigError(f"dtype={dtype} cannot be proved; legal: {', '.join(EPSILON)}")
    wanted = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    bench = _Bench(experiment, device, timeout)
    proof = Proof(dtype, "gloo" if device == "cpu" else "nccl")
    truth = bench.trace(Layout(), "float64")
    _refuse_trivial(truth)
    noise: Errors | None = None
    if dtype != "float64":
        began = time.perf_counter()
        noise = relative_errors(bench.trace(Layout(), dtype), truth)
        proof.rows.append(_row(Layout(), began, noise, ()))
        on_row(proof.rows[-1])
    bounds = Bounds(dtype, noise)
    for layout in wanted:
        row = bench.row(layout, dtype, truth, bounds)
        proof.rows.append(row)
        on_row(row)
    return proof


@dataclass(frozen=True)
class _Bench:
    """Where experiments run."""

    experiment: Experiment
    device: str
    timeout: float

    def trace(self, layout: Layout, dtype: str) -> Trace:
        """The experiment's trace under a layout."""
        records = run_ranks(layout.world_size, self.experiment, layout, dtype, device=self.device, timeout=self.timeout)
        return assemble(records)

    def row(self, layout: Layout, dtype: str, truth: Trace, bounds: Bounds) -> Row:
        """Run a layout and judge it."""
        began = time.perf_counter()
        try:
            found = self.trace(layout, dtype)
        except RankFailure as failure:
            lines = str(failure).strip().splitlines()
            return Row(str(layout), layout.world_size, time.perf_counter() - began, faults=(f"fails: {lines[-1]}",))
        errors = relative_errors(found, truth)
        return _row(layout, began, errors, (*found.faults, *beyond(errors, bounds)))


def _refuse_trivial(truth: Trace) -> None:
    """Zeros agree with zeros in every layout."""
    if not np.isfinite(truth.losses).all():
        raise ConfigError(f"in one process the losses are {truth.losses}; nothing can be compared with them")
    still: dict[str, bool] = {}
    for label, values in truth.tensors.items():
        step, _, name = label.partition(".")
        if step.startswith("grad"):
            still[name] = still.get(name, True) and not values.any()
    names = [name for name, is_still in still.items() if is_still]
    if names:
        raise ConfigError(
            f"in one process the gradients of {listed(names)} are 0 in every step, so that no layout could get them "
            "wrong; let the loss depend on them, or freeze them with requires_grad_(False)"
        )


def _row(layout: Layout, began: float, errors: Errors, faults: tuple[str, ...]) -> Row:
    return Row(
        layout=str(layout),
        ranks=layout.world_size,
        seconds=time.perf_counter() - began,
        loss=_worst(errors, "loss"),
        gradient=_worst(errors, "grad"),
        norm=_worst(errors, "norm"),
        weight=_worst(errors, "weight"),
        faults=faults,
    )


def _worst(errors: Errors, kind: str) -> Worst | None:
    ours = {name: error for name, error in errors.items() if name.startswith(kind)}
    if not ours:
        return None
    where = max(ours, key=lambda name: ours[name])
    return Worst(ours[where], where)
