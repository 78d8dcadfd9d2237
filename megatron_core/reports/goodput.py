"""Goodput: the share of the time since the first start in which training made progress.

Lost time: the start of each process until its first step, the time between the end of a process and the start of the
next, repeated steps after a resume, skipped steps, saves and evaluations. The rest is ``useful``. The time between a
completed run and its continuation with more iterations is neither lost nor useful.
"""

from typing import Any

LOST = ("start", "restart", "repeated", "skipped", "checkpoint", "evaluation")


class Goodput:
    """Sums the lines of one rank's file in order, during training and when reading records."""

    def __init__(self) -> None:
        self.lost = dict.fromkeys(LOST, 0.0)
        self._began: float | None = None
        self._at = 0.0
        self._useful: list[tuple[int, int, float]] = []
        """First step, last step and useful seconds of each range of steps."""
        self.useful = 0.0
        """Useful seconds."""
        self._fresh = self._complete = False

    @property
    def seconds(self) -> float:
        """Seconds since the first start."""
        return 0.0 if self._began is None else self._at - self._began

    @property
    def share(self) -> float:
        """Useful time / whole time; 1 before the first step."""
        return min(self.useful / self.seconds, 1.0) if self.seconds > 0 else 1.0

    def add(self, record: dict[str, Any]) -> None:
        """Add the next line."""
        (self._start if record["kind"] == "start" else self._stretch)(record)

    def _start(self, record: dict[str, Any]) -> None:
        began = record.get("began", self._at)
        if self._began is None:
            self._began = began
        elif self._complete:
            self._began += max(began - self._at, 0.0)
        else:
            self.lost["restart"] += max(began - self._at, 0.0)
        self._complete = False
        self._repeat_after(record.get("iteration", 0))
        self._at, self._fresh = max(began, self._at), True

    def _repeat_after(self, iteration: int) -> None:
        """Count steps after the loaded checkpoint of ``iteration`` as repeated."""
        while self._useful and self._useful[-1][1] > iteration:
            first_step, last_step, seconds = self._useful.pop()
            share_kept = max(iteration - first_step + 1, 0) / max(last_step - first_step + 1, 1)
            self.useful -= seconds * (1 - share_kept)
            self.lost["repeated"] += seconds * (1 - share_kept)
            if share_kept:
                self._useful.append((first_step, iteration, seconds * share_kept))

    def _stretch(self, record: dict[str, Any]) -> None:
        phases, steps = record["phases"], max(record["last"] - record["first"] + 1, 1)  # no steps after the last step
        if self._fresh:
            self.lost["start"] += max(record["at"] - record["seconds"] - self._at, 0.0)
            self._fresh = False
        elsewhere = {name: phases.get(name, 0.0) for name in ("checkpoint", "evaluation")}
        for name, seconds in elsewhere.items():
            self.lost[name] += seconds
        seconds = record["seconds"] - sum(elsewhere.values())
        skipped = seconds * record.get("skipped", 0) / steps
        self.lost["skipped"] += skipped
        self._useful.append((record["first"], record["last"], seconds - skipped))
        self.useful += seconds - skipped
        self._at, self._complete = max(self._at, record["at"]), record.get("complete", False)
