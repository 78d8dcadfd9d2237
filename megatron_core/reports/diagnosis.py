"""Records of a diagnosis: causes of lost time, with evidence, proposed changes, and their gains by the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.planner.explain import flag_of
from megatron_core.planner.hardware import Hardware, Link, known_hardware, read_hardware
from megatron_core.planner.layout_settings import with_settings
from megatron_core.planner.search import Candidate, Search
from megatron_core.reports.summary import RunSummary


@dataclass(frozen=True)
class Change:
    """A proposed change, and the share of a step's time that it is predicted to save."""

    text: str
    gain: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """New values of settings; empty if the change is not a setting, for example hardware."""

    def __str__(self) -> str:
        """The text, with the predicted gain if there is one."""
        return f"{self.text} (predicted gain {self.gain:.1%})" if self.gain else self.text


@dataclass(frozen=True)
class Finding:
    """One cause of lost time."""

    cause: str
    share: float
    evidence: str
    changes: tuple[Change, ...]


def flags(text: str, gain: float, **settings: Any) -> Change:
    """Create a change of settings; its text ends with the flags."""
    words = (word for setting in settings.items() for word in flag_of(*setting))
    return Change(f"{text}: {' '.join(words)}", gain, settings)


@dataclass(frozen=True)
class Diagnosis:
    """All causes, the largest share first."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return lines for a terminal."""
        lines = [f"note: {note}" for note in self.notes]
        for number, finding in enumerate(self.findings, 1):
            lines.append(f"{number}. {finding.cause}: {finding.share:.1%} of the time. {finding.evidence}")
            lines += [f"   - {change}" for change in finding.changes]
        return "\n".join(lines)


COMPUTED = ("products", "attention", "elements", "launches")
"""Kinds of time of the planner that sum to forward and backward."""


def predicted_gain(summary: RunSummary, settings: Mapping[str, Any], collective: str, sending: float) -> float | None:
    """Predicted share of the time per token that ``settings`` save: 1 - (tokens/s now) / (tokens/s then).

    It is at most the time saved in collectives of the kind ``collective`` (the planner's name), which are the cause.

    Both rates come from the planner's cost model. Its hardware is scaled so that predicted and measured times agree for
    forward and backward, and for these collectives, which take the share ``sending`` of the time. Returns None if the
    records are incomplete, or if the layout is illegal or does not fit into memory.
    """
    stored_run = _config(summary)
    if stored_run is None:
        return None
    config, vocab_size = stored_run
    devices = summary.records.header()["world_size"]
    hardware = summary.machine or machine_of(summary)
    try:
        seen = Search(config, devices, hardware, vocab_size).candidate(config)
        search = Search(config, devices, _calibrated(summary, hardware, seen, collective, sending), vocab_size)
        now, then = search.candidate(config), search.candidate(with_settings(config, dict(settings)))
    except (LayoutError, ConfigError, ZeroDivisionError):
        return None
    if summary.records.header().get("device") == "cuda" and not search.fits(then.memory):
        return None
    # Time outside the model is assumed constant per token.
    other_seconds = max(summary.step_seconds - now.seconds, 0.0) / now.cost.tokens
    before, after = (candidate.seconds / candidate.cost.tokens + other_seconds for candidate in (now, then))
    sent_before, sent_after = (
        candidate.cost.by_kind.get(collective, 0.0) / candidate.cost.tokens for candidate in (now, then)
    )
    return min(1 - after / before, sending * (1 - sent_after / sent_before))


def _config(summary: RunSummary) -> tuple[RunConfig, int] | None:
    """Settings of the run, with the batch size of its last step, and vocabulary size."""
    known = RunConfig().flat()
    stored = summary.config
    vocab_size = summary.records.header(0).get("environment", {}).get("vocab_size") or stored.get("vocab_size")
    steps = summary.records.steps()
    if not stored or not vocab_size or not steps:
        return None
    values = known | {name: value for name, value in stored.items() if name in known}
    return RunConfig.from_flat(values | {"global_batch_size": steps[-1]["global_batch_size"]}), vocab_size


def _calibrated(summary: RunSummary, hardware: Hardware, seen: Candidate, collective: str, sending: float) -> Hardware:
    """Scale ``hardware`` to the measured times. ``ZeroDivisionError`` if a predicted or measured time is 0."""
    compute = median(times.typical_compute for times in summary.ranks.values())
    faster = sum(seen.cost.by_kind.get(category, 0.0) for category in COMPUTED) / compute
    wider = seen.cost.by_kind.get(collective, 0.0) / (sending * summary.step_seconds)

    def scaled(link: Link) -> Link:
        return Link(bandwidth=link.bandwidth * wider, latency=link.latency / wider)

    return replace(
        hardware,
        product_flops={dtype: rate * faster for dtype, rate in hardware.product_flops.items()},
        memory_bandwidth=hardware.memory_bandwidth * faster,
        launch_seconds=hardware.launch_seconds / faster,
        step_seconds=0.0,
        intra=scaled(hardware.intra),
        inter=scaled(hardware.inter),
    )


def machine_of(summary: RunSummary) -> Hardware:
    """The machine in a run's records; for an unknown GPU an H100, whose rates are then scaled to the measured times."""
    header = summary.records.header(0)
    hosts = {summary.records.header(rank).get("host") for rank in summary.ranks}
    per_node = max(len(summary.ranks) // len(hosts), 1)
    if header.get("device") == "cuda":
        name = str(header.get("environment", {}).get("device", "")).lower()
        known = next((model for model in known_hardware() if model in name), "h100")
        return replace(read_hardware(known), memory_bytes=header.get("memory_total") or 80e9)
    link = Link(bandwidth=2e9, latency=2e-5)
    return Hardware(
        name="cpu", source="typical figures", memory_bytes=header.get("memory_total") or 64e9, reserved_bytes=0.0,
        devices_per_node=per_node, product_flops=dict.fromkeys(("float32", "float64", "bfloat16"), 5e10),
        product_edge=32.0, attention_efficiency=0.3, memory_bandwidth=1e10, launch_seconds=5e-6, intra=link, inter=link,
        overlap=0.25, has_host=False, host_link=1e10, host_memory_bandwidth=1e10,
    )  # fmt: skip
