"""docs/resilience.md contains every flag, fault and exit status."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from megatron_core.command import INTERRUPTED
from megatron_core.config.resilience import FAULTS, ResilienceConfig
from megatron_core.parallel.exit_status import FAILED, RESTART

PAGE = (Path(__file__).resolve().parents[2] / "docs/resilience.md").read_text()


def test_every_flag_fault_and_status_is_named() -> None:
    for field in fields(ResilienceConfig):
        assert re.search(rf"`--{field.name.replace('_', '-')}\b", PAGE), field.name
    assert all(f"`{kind}`" in PAGE for kind in FAULTS)
    assert all(f"| {status} |" in PAGE for status in (0, FAILED, RESTART, INTERRUPTED))
