"""Write one HTML page about a training run; it needs no network, and is readable on a phone, a screen and paper.

megatron-report runs/mine --out report.html

megatron-report runs/mine --compare runs/before runs/other --out report.html

RUN is the folder of --save, or the file of --metrics-file.
"""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("report")

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from megatron_core.terminal import parse_flags


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """The run to report, and the file to write."""

    run: tyro.conf.Positional[str]
    """Folder of --save, or metrics file, of a run."""
    out: str = "report.html"
    """File to write."""
    compare: tuple[str, ...] = ()
    """Other runs to compare with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, write the page and exit."""
    settings = parse_flags(ReportFlags, args=arguments, description=__doc__)
    from megatron_core.reports.report import write_report  # loads torch, which --help does not need

    status = status_of(lambda: write_report(settings.run, settings.out, settings.compare))
    print("" if status else f"wrote {settings.out}\n", end="")
    return status
