"""Format a parity report as a table, for a terminal and for a documentation page."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_core.errors import wrapped
from megatron_core.verify.bits import BitsReport
from megatron_core.verify.bounds import EPSILON
from megatron_core.verify.comparison import BITS_HEADING, HEADING, changed_lines
from megatron_core.verify.parity import ParityReport, Row, Worst

_HEAD = ("layout", "ranks", "loss", "gradient", "norm", "weights", "worst gradient", "verdict")
_TERMINAL_HEAD = ("layout", "ranks", "loss", "gradient", "norm", "weights", "verdict", "s")
_MOST_FAULTS = 3
LONGEST_VALUE = 40
"""Maximum number of characters of a printed value."""
_LONGEST_FAULT = 150


class TerminalTable:
    """Formats a parity report row by row, to show progress; errors are relative."""

    def __init__(self, layouts: list[str], dtype: str) -> None:
        self.epsilon = EPSILON[dtype]
        width = max(map(len, [*layouts, _HEAD[0], "1 process"]))
        self.widths = (width, 5, 8, 8, 8, 8, 7, 5)

    def head(self) -> str:
        """The header line."""
        return self._line(_TERMINAL_HEAD)

    def lines(self, row: Row) -> Iterator[str]:
        """Yield the lines of a row and of its faults; a failing row also names its worst gradient."""
        errors = ("-" if worst is None else f"{worst.error:.1e}" for worst in _errors(row))
        yield self._line((row.layout, str(row.ranks), *errors, _verdict(row), f"{row.seconds:.1f}"))
        if row.memory is not None and row.processor_seconds is not None:
            took = f"{row.processor_seconds:.0f} s of processor time, {row.memory:.1f} GB"
            yield f"    {row.ranks} simulated ranks: {took}"
        if row.gradient is not None and not row.holds:
            yield f"    worst gradient: {row.gradient.where}, {_error(row.gradient, self.epsilon)}"
        for fault in row.faults[:_MOST_FAULTS]:
            yield f"    {textwrap.shorten(fault, _LONGEST_FAULT, placeholder=' ...')}"
        if len(row.faults) > _MOST_FAULTS:
            yield f"    ... and {len(row.faults) - _MOST_FAULTS} more"
        if row.culprit:
            yield f"    {row.culprit}"

    def print_row(self, row: Row) -> None:
        """Print the lines of a row at once."""
        print(*self.lines(row), sep="\n", flush=True)

    def _line(self, texts: tuple[str, ...]) -> str:
        padded = (
            text.ljust(width) if name in ("layout", "verdict") else text.rjust(width)
            for name, text, width in zip(_TERMINAL_HEAD, texts, self.widths, strict=True)
        )
        return "  ".join(padded).rstrip()


def print_wrapped(*lines: str) -> None:
    """Print each of ``lines`` on as many lines of a terminal as it needs, without breaks inside words."""
    for line in lines:
        print(wrapped(line), flush=True)


def _errors(row: Row) -> tuple[Worst | None, ...]:
    return (row.loss, row.gradient, row.norm, row.weight)


def _verdict(row: Row) -> str:
    return "holds" if row.holds else "FAILS"


def cells(row: Row, epsilon: float) -> tuple[str, ...]:
    """Return the texts of a row of a page: its errors are also in units of ``epsilon``."""
    where = f"`{row.gradient.where}`" if row.gradient else "``"
    return (row.layout, str(row.ranks), *(_error(worst, epsilon) for worst in _errors(row)), where, _verdict(row))


def _error(worst: Worst | None, epsilon: float) -> str:
    """Format a relative error, also in units of epsilon: ``4.3e-15 (19 ε)``."""
    if worst is None:
        return "-"
    epsilons = worst.error / epsilon
    digits = ".0f" if epsilons < 1e5 else ".0e"
    digits = ".1f" if epsilons < 10 else digits
    return f"{worst.error:.1e} ({epsilons:{digits}} ε)"


def layout_page(report: ParityReport, subject: str, left_out: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a Markdown page, without times, which differ between runs.

    ``left_out``: settings that are not compared.
    """
    yield from (
        HEADING,
        "",
        f"{subject[0].upper()}{subject[1:]}.",
        "",
        f"{verdict_line(summary_line(report), left_out)}.",
        "",
    )
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'|'.join('---' for _ in _HEAD)}|"
    for row in report.rows:
        yield f"| {' | '.join(cells(row, EPSILON[report.dtype]))} |"


def summary_line(report: ParityReport) -> str:
    """One line with the number of layouts that pass."""
    layouts = [row for row in report.rows if row.compared]
    passing = sum(row.holds for row in layouts)
    return f"{passing} of {len(layouts)} layouts hold in {report.dtype} over {report.backend} ({report.bound})"


def verdict_line(text: str, left_out: Sequence[str]) -> str:
    """A summary with the settings that the comparison leaves out."""
    return f"{text}; not compared: {', '.join(left_out)}" if left_out else text


def setting_words(settings: Mapping[str, object]) -> list[str]:
    """Settings as texts; a switch is its name, and a long value is left out."""
    texts = {name: "" if value is True else f"={value}" for name, value in settings.items()}
    return [f"{name}{text if len(text) <= LONGEST_VALUE else ''}" for name, text in texts.items()]


@dataclass(frozen=True)
class Verdict:
    """Lists of the parts of a run that a comparison includes, and of the other parts."""

    steps: int
    thorough: bool
    unresumed: str
    """Why trainings on files, and checkpoints, are not compared; empty if they are."""
    switches: Mapping[str, object]
    """Settings that the layouts have and the reference has not."""
    changed: Mapping[str, tuple[object, object]]

    def compared(self) -> list[str]:
        """The compared quantities."""
        quantities = [f"losses, gradients, norms and reported values of {self.steps} steps, and the weights after them"]
        if self.thorough:
            quantities += ["optimizer state", "averaged weights", "evaluation"]
        if not self.unresumed:
            quantities += ["the schedules of a training on token files", "checkpoints into and from one process"]
        return quantities

    def missing(self) -> list[str]:
        """The quantities that are not compared, with the reason."""
        state = [] if self.thorough else ["optimizer state, averaged weights, evaluation: add --thorough"]
        files = f"data loader, schedules to their end, checkpoints: {self.unresumed}"
        return [*state, *([files] if self.unresumed else [])]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the verdict."""
        yield f"compared: {', '.join(self.compared())}"
        yield from (f"not compared: {text}" for text in self.missing())
        if self.switches:
            yield f"compared with one process without: {', '.join(setting_words(self.switches))}"
        yield from changed_lines(self.changed)

    def as_dict(self) -> dict[str, Any]:
        """The lists as a dict for JSON."""
        changed = {name: list(map(str, values)) for name, values in self.changed.items()}
        switches = setting_words(self.switches)
        return {"compared": self.compared(), "missing": self.missing(), "switches": switches, "changed": changed}


def bits_page(
    report: BitsReport, subject: str, refused: Mapping[str, str], left_out: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the lines of a Markdown page; ``refused``: layouts that were not compared, with the reason."""
    result = verdict_line(report.summary, left_out)
    yield from (BITS_HEADING, "", f"{subject[0].upper()}{subject[1:]}.", "", f"{result}.", "")
    for ranks in sorted({row.ranks for row in report.rows}):
        rows = [row for row in report.rows if row.ranks == ranks]
        equal = [f"`{row.layout}`" for row in rows if row.holds]
        yield from (f"## {ranks} ranks", "", f"{len(equal)} of {len(rows)} layouts: {', '.join(equal) or 'none'}.", "")
        yield from (f"- `{row.layout}` differs: {row.verdict}" for row in rows if not row.holds)
        if len(equal) < len(rows):
            yield ""
    if refused:
        yield from ("## Refused", "", f"{len(refused)} layouts are refused with these settings:", "")
    for reason in dict.fromkeys(refused.values()):
        names = ", ".join(f"`{name}`" for name, refusal in refused.items() if refusal == reason)
        yield f"- {names}: {reason}"
