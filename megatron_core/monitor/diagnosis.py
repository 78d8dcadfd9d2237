"""What holds a run back, with evidence, a share of time, and what to change, by the rules of ``diagnosis_rules``."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_core.monitor.diagnosis_rules import RULES, compute_bound
from megatron_core.monitor.findings import Finding
from megatron_core.monitor.summary import Summary


@dataclass(frozen=True)
class Diagnosis:
    """All causes, the largest first."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """For a terminal."""
        lines = [f"note: {note}" for note in self.notes]
        for number, finding in enumerate(self.findings, 1):
            lines.append(f"{number}. {finding.cause}: {finding.share:.1%} of the time. {finding.evidence}")
            lines += [f"   - {change}" for change in finding.changes]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def diagnose(summary: Summary) -> Diagnosis:
    """Apply every rule; without any other cause the run is compute-bound."""
    found = [finding for rule in RULES if summary.ranks for finding in rule(summary)]
    found.sort(key=lambda finding: -finding.share)
    findings = [
        Finding(f.cause, f.share, f.evidence, tuple(sorted(f.changes, key=lambda change: -change.gain))) for f in found
    ]
    if summary.ranks:
        findings.append(compute_bound(summary))
    notes = list(summary.records.notes)
    if not summary.ranks:
        notes.append("no step has times: nothing can be said about the bottleneck")
    return Diagnosis(tuple(findings), tuple(notes))
