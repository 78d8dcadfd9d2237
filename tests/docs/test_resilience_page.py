"""docs/resilience.md contains every flag, fault and exit status."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from megatron_core import resilience
from megatron_core.command import INTERRUPTED
from megatron_core.config.training import BadStepConfig
from megatron_core.parallel.exit_status import FAILED, RESTART
from megatron_core.resilience.settings import FAULTS

PAGE = (Path(__file__).resolve().parents[2] / "docs/resilience.md").read_text()


def test_every_flag_fault_and_status_is_named() -> None:
    sections = [BadStepConfig, *(feature.settings for feature in resilience.FEATURES if feature.settings is not None)]
    for name in (field.name for section in sections for field in fields(section)):
        assert re.search(rf"`--{name.replace('_', '-')}\b", PAGE), name
    assert all(f"`{kind}`" in PAGE for kind in FAULTS)
    assert all(f"| {status} |" in PAGE for status in (0, FAILED, RESTART, INTERRUPTED))
