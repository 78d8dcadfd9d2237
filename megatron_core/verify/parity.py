"""Parity check: compare an experiment under many layouts with the same experiment in one process."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megatron_core.cpu_ranks.shared_memory import backend as shared_memory
from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import listed
from megatron_core.planner.layout import Layout
from megatron_core.verify.bounds import (
    EPSILON,
    FLOAT64_BOUND,
    NOISE_FACTOR,
    REORDERED_RUNS,
    Bounds,
    Errors,
    beyond,
    relative_errors,
    rounding_noise,
)
from megatron_core.verify.culprit import RankFindings, Reference, describe_culprit, first_step
from megatron_core.verify.ranks import RankFailure, run_ranks, run_simulated
from megatron_core.verify.trace import RankTrace, Trace, assemble


class Experiment(Protocol):
    """A training that can run under any layout."""

    def __call__(self, layout: Layout, dtype: str) -> RankTrace:
        """Train as one rank of a world of ``layout.world_size`` ranks, and return this rank's trace.

        Weights, batches and random numbers must be functions of names and indices that do not depend on the layout.
        """
        ...


@runtime_checkable
class Locating(Protocol):
    """An experiment that can find the first wrong tensor of a layout; its functions are called on every rank."""

    def record(self, step: int) -> Reference:
        """The tensors of ``step``, from 0, in one process."""
        ...

    def compare(self, layout: Layout, reference: Reference, step: int) -> RankFindings:
        """This rank's wrong tensors of ``step``."""
        ...


@runtime_checkable
class Referenced(Protocol):
    """An experiment whose results in one process have to be those of a layout only with other settings."""

    def reference(self, layout: Layout) -> Experiment:
        """The experiment that must give in one process what this one gives under ``layout``; equal ones run once."""
        ...


def reference_of(experiment: Any, layout: Layout) -> Any:
    """The experiment whose results in one process are those that ``layout`` must give."""
    return experiment.reference(layout) if isinstance(experiment, Referenced) else experiment


@dataclass(frozen=True)
class Worst:
    """The largest relative error among quantities of a kind, and the name of that quantity."""

    error: float
    where: str


@dataclass(frozen=True)
class Row:
    """Result of one layout."""

    layout: str
    ranks: int
    seconds: float
    loss: Worst | None = None
    gradient: Worst | None = None
    norm: Worst | None = None
    weight: Worst | None = None
    compared: bool = True
    """Whether the row compares a layout, and does not measure the rounding of one process."""
    processor_seconds: float | None = None
    """Processor time of a simulated world."""
    memory: float | None = None
    """Largest memory of a simulated world, in GB."""
    faults: tuple[str, ...] = ()
    """Reasons why the layout fails; empty if it passes."""
    culprit: str = ""
    """The first wrong tensor of a layout that fails, if the experiment can find it."""

    @property
    def holds(self) -> bool:
        """Whether the layout gives the same results as one process."""
        return not self.faults


@dataclass(frozen=True)
class ParityReport:
    """Results of all layouts."""

    dtype: str
    backend: str
    rows: list[Row] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all layouts pass; False without rows."""
        return bool(self.rows) and all(row.holds for row in self.rows)

    @property
    def bound(self) -> str:
        """The error bound as text."""
        if self.dtype == "float64":
            return f"relative errors against one process; at most {FLOAT64_BOUND:.0e} each"
        return (
            f"relative errors against one process in float64; each at most {NOISE_FACTOR:g} times the largest "
            f"of {1 + REORDERED_RUNS} runs of one process in {self.dtype}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        return {
            "dtype": self.dtype,
            "epsilon": EPSILON[self.dtype],
            "backend": self.backend,
            "bound": self.bound,
            "holds": self.holds,
            "rows": [asdict(row) | {"holds": row.holds} for row in self.rows],
        }


def check_parity(
    experiment: Experiment,
    layouts: Iterable[Layout | str],
    *,
    dtype: str = "float64",
    device: str = "cpu",
    backend: str = "auto",
    on_row: Callable[[Row], None] = lambda row: None,
    timeout: float = 300.0,
) -> ParityReport:
    """Run ``experiment`` in one process and under each of ``layouts``, and compare.

    ``dtype`` is one of ``EPSILON``; ``device`` is cpu, cuda (NCCL, one GPU per rank) or simulated (ranks
    are threads, for large worlds); ``backend`` is auto or, on the CPU, gloo. ``timeout`` is that of a layout whose
    ranks are processes. ``on_row`` is called with each row. A layout that fails to run gives a row with faults.
    Errors: ``RankFailure`` if the experiment fails in one process; ``ConfigError`` if its results are unsuitable for a
    comparison: a loss that is not finite, or a parameter whose gradients are all 0.
    """
    if dtype not in EPSILON:
        raise ConfigError(f"dtype={dtype} cannot be compared; legal: {', '.join(EPSILON)}")
    wanted = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    names = {"cpu": shared_memory.expected(backend), "cuda": "nccl", "simulated": "simulated ranks"}
    report = ParityReport(dtype, names[device])

    def add(row: Row) -> None:
        report.rows.append(row)
        on_row(row)

    runner = _Runner(device, backend, timeout)
    baselines = list[_Baseline]()
    for layout in wanted:
        reference = reference_of(experiment, layout)
        baseline = next((known for known in baselines if known.experiment == reference), None)
        if baseline is None:
            baseline = runner.baseline(reference, dtype)
            baselines.append(baseline)
            if baseline.rounding is not None:
                name = str(Layout()) if len(baselines) == 1 else f"{Layout()} for {layout}"
                add(replace(baseline.rounding, layout=name, compared=False))
        add(runner.row(experiment, layout, dtype, baseline))
    return report


@dataclass(frozen=True)
class _Baseline:
    """The results of one process, with which layouts are compared."""

    experiment: Any
    trace: Trace
    bounds: Bounds
    rounding: Row | None
    """The errors of one process in another dtype than float64."""


@dataclass(frozen=True)
class _Runner:
    """Runs experiments on a device and backend."""

    device: str
    backend: str
    timeout: float

    def baseline(self, experiment: Experiment, dtype: str) -> _Baseline:
        """Run ``experiment`` in one process in float64, and several times in ``dtype`` if that is another one."""
        trace, _ = self.trace(experiment, Layout(), "float64")
        _refuse_trivial(trace)
        if dtype == "float64":
            return _Baseline(experiment, trace, Bounds(dtype), None)
        began = time.perf_counter()
        device = "cuda" if self.device == "cuda" else "cpu"
        errors, noise = rounding_noise(experiment, Layout(), dtype, baseline=trace, device=device, timeout=self.timeout)
        return _Baseline(experiment, trace, Bounds(dtype, noise), _row(Layout(), began, errors, ()))

    def trace(self, experiment: Experiment, layout: Layout, dtype: str) -> tuple[Trace, dict[str, Any]]:
        """Run an experiment under a layout and return its trace, and of a simulated world what it took."""
        if self.device == "simulated" and layout.world_size > 1:
            run = run_simulated(layout.world_size, experiment, layout, dtype, finish=assemble, layout=layout)
            return run.result, {"processor_seconds": run.processor_seconds, "memory": run.bytes / 1e9}
        traces = run_ranks(
            layout.world_size,
            experiment,
            layout,
            dtype,
            timeout=self.timeout if self.device != "simulated" else 10 * self.timeout,
            device="cuda" if self.device == "cuda" else "cpu",
            backend=self.backend,
        )
        return assemble(traces), {}

    def row(self, experiment: Experiment, layout: Layout, dtype: str, baseline: _Baseline) -> Row:
        """Run a layout and compare it with the baseline."""
        began = time.perf_counter()
        try:
            trace, resources = self.trace(experiment, layout, dtype)
        except RankFailure as failure:
            lines = str(failure).strip().splitlines()
            return Row(str(layout), layout.world_size, time.perf_counter() - began, faults=(f"fails: {lines[-1]}",))
        errors = relative_errors(trace, baseline.trace)
        bounds = baseline.bounds
        row = replace(_row(layout, began, errors, (*trace.faults, *beyond(errors, bounds))), **resources)
        if row.holds or dtype != "float64" or not isinstance(experiment, Locating):
            return row
        wrong = {name: error for name, error in errors.items() if not error <= bounds.of(name)}
        return replace(row, culprit=self._culprit(experiment, baseline.experiment, layout, wrong))

    def _culprit(self, experiment: Locating, alone: Locating, layout: Layout, wrong: Errors) -> str:
        """The sentence about the first wrong tensor."""
        try:
            step = first_step(wrong)
            (reference,) = self._results(Layout(), alone.record, step)
            findings = self._results(layout, experiment.compare, layout, reference, step)
        except RankFailure as failure:
            return f"the first wrong tensor was not found: {str(failure).strip().splitlines()[-1]}"
        return describe_culprit(reference, findings, wrong)

    def _results(self, layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on the ranks of a layout."""
        if self.device == "simulated" and layout.world_size > 1:
            return run_simulated(layout.world_size, function, *args, layout=layout).result
        device = "cuda" if self.device == "cuda" else "cpu"
        return run_ranks(
            layout.world_size, function, *args, timeout=10 * self.timeout, device=device, backend=self.backend
        )


def _refuse_trivial(baseline: Trace) -> None:
    """Raise ConfigError for non-finite losses, and for gradients of zero, which would agree in every layout."""
    if not np.isfinite(baseline.losses).all():
        raise ConfigError(
            f"in one process the losses are {baseline.losses}, which are not finite and cannot be compared"
        )
    still: dict[str, bool] = {}
    for label, values in baseline.tensors.items():
        step, _, name = label.partition(".")
        if step.startswith("grad"):
            still[name] = still.get(name, True) and not values.any()
    names = [name for name, is_still in still.items() if is_still]
    if names:
        raise ConfigError(
            f"in one process the gradients of {listed(names)} are 0 in every step, so that they cannot be compared; "
            "use a loss that depends on them, or freeze them with requires_grad_(False)"
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


def _worst(errors: Errors, prefix: str) -> Worst | None:
    ours = {name: error for name, error in errors.items() if name.startswith(prefix)}
    if not ours:
        return None
    where = max(ours, key=lambda name: ours[name])
    return Worst(ours[where], where)
