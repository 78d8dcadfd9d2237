"""Repeats a step with a suspicious result, in place and on other ranks, and finds its cause.

A result is suspicious if its loss or gradient norm is not finite, or if a callback such as ``BadSteps`` rejects the
step; its update is skipped, so that the weights are those of the first attempt. The step is repeated with the same
samples: first on the same ranks, then each copy of the model computes the samples of the next copy. The sums of the
losses of each copy's samples are compared, in place bit by bit and on other ranks within rounding.
docs/resilience.md describes the verdicts. With ``replay_interval`` each copy also computes the samples of the next one
in steps that are not suspicious, before their update.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_core.parallel.texts import listed
from megatron_core.resilience.settings import RerunConfig
from megatron_core.resilience.wrong_step import WrongStepError
from megatron_core.training.callbacks import Callback
from megatron_core.training.parts import Attempt, Attempts, Compute
from megatron_core.training.setup import Run

TOLERANCE = 1e-4
"""Relative difference that another order of summation explains, in 16-bit precision."""
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
"""The same in other precisions."""


class Reruns(Callback, Attempts):
    """Takes the steps of a run with ``rerun_mode`` or ``replay_interval``, and counts the results."""

    priority = 350
    by_copy = True
    """See ``Attempts``."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._settings = run.config.section(RerunConfig)
        self._mode = self._settings.rerun_mode
        self.counts: Counter[str] = Counter()
        """Number of repeated steps by verdict; with ``report_stats`` of steps that were equal or different."""
        self._largest = 0.0

    def before_run(self) -> None:
        """Take the steps of the run."""
        run = self.run
        interval = self._settings.replay_interval
        run.attempts = self
        if interval is not None and run.groups.size("dp") == 1 and run.world.rank == 0:
            print(f"note: replay_interval={interval} has no effect: no other data-parallel replica is left", flush=True)

    def take(self, compute: Compute) -> Attempt:
        """Compute a step, and again if it is suspicious or replayed, or always with ``report_stats``.

        Errors: ``WrongStepError`` if other ranks compute other losses for the same samples.
        """
        settings = self._settings
        scale = self.run.optimizer.loss_scale.state_dict()
        interval = settings.replay_interval
        copies = self.run.groups.size("dp")
        if interval is not None and copies > 1 and (self.run.state.iteration + 1) % interval == 0:
            moved = compute(1, shift=1, discard=True)
            self.run.optimizer.loss_scale.load_state_dict(scale)
            first = compute()
            self._compare(first, moved)
            validates = self._mode == "validate_results" and self._is_suspicious(first)
            return self._validate(first, compute) if validates else first
        if self._mode == "disabled":
            return compute()
        if self._mode == "report_stats":
            return self._measure(compute)
        first = compute()
        return self._validate(first, compute) if self._is_suspicious(first) else first

    def is_spoiled(self, number: int, shift: int) -> bool:
        """Whether ``error_injection_rate`` replaces this rank's loss in an attempt of the next step by NaN.

        Steps and copies are drawn by (seed, iteration). transient_error: the first attempt of a copy's ranks.
        persistent_error: all attempts of these ranks. correct_result: the samples of a copy, on any rank.
        """
        run = self.run
        settings = self._settings
        copies = run.groups.size("dp")
        drawn = random.Random(f"{run.config.training.seed}:{run.state.iteration}")
        if not settings.error_injection_rate or drawn.randrange(settings.error_injection_rate):
            return False
        spoiled_copy = drawn.randrange(copies)
        this_copy = run.groups.index("dp")
        if settings.error_injection_type == "correct_result":
            return (this_copy + shift) % copies == spoiled_copy
        is_persistent = settings.error_injection_type == "persistent_error"
        return this_copy == spoiled_copy and (number == 0 or is_persistent)

    def _compare(self, first: Attempt, moved: Attempt) -> None:
        tolerance = TOLERANCES.get(self.run.config.training.compute_dtype, TOLERANCE)
        wrong = _wrong_copies(first, moved, tolerance)
        different = _different(first, moved, tolerance)
        if not wrong:
            return
        if wrong == different and len(wrong) == 1 and math.isfinite(first.losses[wrong[0]]):
            wrong = sorted({*wrong, (wrong[0] - 1) % len(first.losses)})  # one of two copies, in one attempt
        step = self.run.state.iteration + 1
        ranks = self._members(wrong)
        which = "one of ranks" if len(ranks) > 1 else "rank"
        raise WrongStepError(
            f"{which} {listed(ranks)} computed wrong values in step {step}: other ranks have other losses for the same "
            "samples. Exclude or replace it, and test its processor and memory",
            first=step,
            ranks=ranks if len(wrong) == 1 else (),
        )

    def _is_suspicious(self, attempt: Attempt) -> bool:
        """Whether a step was skipped, except for an overflow that lowers a dynamic loss scale."""
        outcome = attempt.outcome
        overflow = (
            self.run.config.training.fp16 and math.isfinite(outcome.loss) and not math.isfinite(outcome.grad_norm)
        )
        return not math.isfinite(outcome.loss) or (outcome.skipped and not overflow)

    def _measure(self, compute: Compute) -> Attempt:
        """Compute a step twice, and count the differences."""
        scale = self.run.optimizer.loss_scale.state_dict()
        first = compute(discard=True)
        self.run.optimizer.loss_scale.load_state_dict(scale)
        second = compute(1)
        pairs = zip((*first.losses, first.outcome.grad_norm), (*second.losses, second.outcome.grad_norm), strict=True)
        self._largest = max([self._largest, *(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b)])
        self.counts["equal" if _same(first, second) else "different"] += 1
        return second

    def _validate(self, first: Attempt, compute: Compute) -> Attempt:
        """Repeat a suspicious step until its cause is known; return the last attempt."""
        scale = self.run.optimizer.loss_scale.state_dict()
        again = compute(1)
        if not _same(first, again):
            self._say("transient", first, _different(first, again), "repeated on the same ranks it has another result")
            return again
        copies = self.run.groups.size("dp")
        if copies == 1:
            self._say("correct", first, [], "repeated on the same ranks it is the same; there is no other copy")
            return again
        self.run.optimizer.loss_scale.load_state_dict(scale)
        moved = compute(2, shift=1)
        if _same(again, moved, TOLERANCE):
            self._say("correct", first, [], "it is the same on the same and on other ranks")
            return moved
        wrong = _wrong_copies(again, moved)
        self._say("persistent", first, wrong, "the same ranks repeat it, other ranks do not")
        self.run.stop_reason = f"a persistent error on {self._ranks(wrong)}"
        return replace(moved, outcome=replace(moved.outcome, stop=True))

    def _say(self, verdict: str, first: Attempt, copies: Sequence[int], reason: str) -> None:
        self.counts[verdict] += 1
        if self.run.world.rank != 0:
            return
        outcome = first.outcome
        where = f" on {self._ranks(copies)}" if copies else ""
        what = f"loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        print(
            f"note: suspicious result at iteration {self.run.state.iteration + 1} ({what}): {verdict}{where}: {reason}",
            flush=True,
        )

    def _ranks(self, copies: Sequence[int]) -> str:
        """The ranks of some copies, in words."""
        ranks = self._members(copies)
        return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}" if ranks else "unknown ranks"

    def _members(self, copies: Sequence[int]) -> list[int]:
        """The launcher's ranks of some copies."""
        grid = self.run.groups.grid
        ranks = [rank for rank in range(grid.world_size) if grid.coordinates(rank)["dp"] in copies]
        return [self.run.world.launcher_rank(rank) for rank in ranks]

    def after_run(self) -> None:
        """Print the counts."""
        if not self.counts or self.run.world.rank != 0:
            return
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.counts.items()))
        largest = f"; largest relative difference {self._largest:.3g}" if self._mode == "report_stats" else ""
        print(f"repeated steps: {counts}{largest}", flush=True)


def _wrong_copies(again: Attempt, moved: Attempt, tolerance: float = TOLERANCE) -> list[int]:
    """The copies that compute wrong values, as far as two attempts show it: copy c computed the samples c in ``again``
    and c + 1 in ``moved``, so that both differ if it is wrong in both."""
    different = _different(again, moved, tolerance)
    copies = len(again.losses)
    not_finite = [copy for copy in different if not math.isfinite(again.losses[copy])]
    not_finite += [(copy - 1) % copies for copy in different if not math.isfinite(moved.losses[copy])]
    return sorted(set(not_finite)) or [copy for copy in different if (copy + 1) % copies in different] or different


def _same(first: Attempt, second: Attempt, tolerance: float = 0.0) -> bool:
    """Whether two attempts computed the same losses and, within rounding, gradient norms."""
    norms = first.outcome.grad_norm, second.outcome.grad_norm
    return not _different(first, second, tolerance) and _close(*norms, TOLERANCE)


def _different(first: Attempt, second: Attempt, tolerance: float = 0.0) -> list[int]:
    """Copies whose samples have another loss in the ``second`` attempt."""
    pairs = enumerate(zip(first.losses, second.losses, strict=True))
    return [copy for copy, (a, b) in pairs if not _close(a, b, tolerance)]


def _close(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance) or not (math.isfinite(a) or math.isfinite(b))
