"""The summary line at the end of a run: the number of planted defects that were detected."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """``defects planted / caught: 35 / 35``; with -v also how each of them was detected."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ())]
    properties = [dict(report.user_properties) for report in reports if report.when == "call"]
    planted = [each for each in properties if "defect" in each]
    if not planted:
        return
    terminalreporter.section("planted defects")
    if terminalreporter.verbosity > 0:
        for each in planted:
            terminalreporter.line(f"{each['defect']}: {each.get('given away by', 'NOT CAUGHT')}")
    caught = sum("given away by" in each for each in planted)
    terminalreporter.line(f"defects planted / caught: {len(planted)} / {caught}")
