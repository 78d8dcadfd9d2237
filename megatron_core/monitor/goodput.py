"""Goodput: the share of the time since the first start in which training went forward.

What a run loses: the start of each process until its first step, the time between a process's end and the start of
the next, steps that a resumed run repeats, steps that were skipped, saves and evaluations. The rest is ``useful``. The
time between a run that did all its iterations and its continuation with more of them counts neither as lost nor useful.
"""

from typing import Any

LOST = ("start", "restart", "repeated", "skipped", "checkpoint", "evaluation")


class Goodput:
    """Adds up the lines of one rank's file, in their order; while a run trains and when it is read again."""

    def __init__(self) -> None:
        self.lost = dict.fromkeys(LOST, 0.0)
        self._began: float | None = None
        self._at = 0.0
        self._useful: list[tuple[int, int, float]] = []
        """First and last step of each stretch, and its useful seconds."""
        self._total_useful = 0.0
        self._fresh = self._complete = False

    @property
    def seconds(self) -> float:
        """Since the first start."""
        return 0.0 if self._began is None else self._at - self._began

    @property
    def useful(self) -> float:
        """Seconds of steps that count."""
        return self._total_useful

    @property
    def share(self) -> float:
        """Useful over all; 1 before the first step."""
        return min(self.useful / self.seconds, 1.0) if self.seconds > 0 else 1.0

    def add(self, record: dict[str, Any]) -> None:
        """Take the next line."""
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
        """What was done after the checkpoint that a process resumes from was done for nothing."""
        while self._useful and self._useful[-1][1] > iteration:
            first, last, seconds = self._useful.pop()
            kept = max(iteration - first + 1, 0) / max(last - first + 1, 1)
            self._total_useful -= seconds * (1 - kept)
            self.lost["repeated"] += seconds * (1 - kept)
            if kept:
                self._useful.append((first, iteration, seconds * kept))

    def _stretch(self, record: dict[str, Any]) -> None:
        phases, steps = record["phases"], max(record["last"] - record["first"] + 1, 1)  # none: what follows the last
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
        self._total_useful += seconds - skipped
        self._at, self._complete = max(self._at, record["at"]), record.get("complete", False)
