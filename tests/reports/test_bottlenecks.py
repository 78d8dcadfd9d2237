"""Bottlenecks planted in short real runs: a sample of those in ``make verify-all``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reports.bottlenecks import BOTTLENECKS, diagnosed, recommended

SAMPLE = {
    "a rank computes slowly": "",
    "nothing is read ahead": "num_workers",
    "checkpoints go to a slow disk": "save_interval",
    "seven of eight layers on one stage": "decoder_last_pipeline_num_layers",
}
"""With the setting changed by the first recommendation, if there is one."""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_planted_cause_is_named_first(name: str, tmp_path: Path) -> None:
    planted = BOTTLENECKS[name]
    found = diagnosed(planted, tmp_path, steps=7)
    assert found.findings[0].cause == planted.cause, found.text()
    after = recommended(planted, found)
    setting = SAMPLE[name]
    if setting:
        assert after.fault == planted.fault and after.settings[setting] != planted.settings[setting]
    else:
        assert after.settings == planted.settings and planted.fault and not after.fault
