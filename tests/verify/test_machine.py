"""The current machine is measured and the planner reads the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_core.commands.diagnose import main
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.planner.cost import step_cost
from megatron_core.planner.hardware import read_hardware
from megatron_core.verify.machine import (
    LARGE_STEP,
    MESSAGES,
    SMALL_STEP,
    RankMeasurements,
    calibrated,
    disk_rates,
    link_of,
)


@pytest.mark.whole_matrix
def test_file_for_the_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    assert main(["--machine", "--quick", "--ranks", "2", "--output", str(path)]) == 0
    text = capsys.readouterr().out
    assert "2 ranks, 16.0 MiB each: all-gather" in text and "disk: writes" in text
    found = read_hardware(str(path))
    assert found.devices_per_node == 2 and found.flops("float32") > 1e8 and not found.has_host


def test_link_is_the_line_through_a_small_and_a_large_message() -> None:
    latency, bandwidth = 3e-5, 2e9
    times = {size: (latency * 2 + 3 * size / bandwidth, 0.0) for size in MESSAGES}  # 4 ranks: 2 steps, 3 parts
    found = link_of(RankMeasurements({}, 0.0, 0.0, 1e9, 1e9, {2: {}, 4: times}))
    assert found.bandwidth == pytest.approx(bandwidth) and found.latency == pytest.approx(latency, rel=0.05)


def test_calibration_explains_a_small_step() -> None:
    machine = calibrated(replace(read_hardware("h100"), step_seconds=0.0), 0.01)
    config = RunConfig.from_flat(SMALL_STEP)
    assert step_cost(config, 1, machine, 128).seconds == pytest.approx(0.01, rel=1e-3)


def test_calibration_explains_a_large_step_with_the_rates() -> None:
    machine = calibrated(replace(read_hardware("h100"), step_seconds=0.0), 0.01, 0.7)
    config = RunConfig.from_flat(LARGE_STEP)
    assert step_cost(config, 1, machine, 2048).seconds == pytest.approx(0.7, rel=1e-3)
    assert machine.flops("float32") < read_hardware("h100").flops("float32")


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "there is no run to diagnose"), (["--machine", "--ranks", "0"], "ranks=0 is out of range")],
)
def test_bad_input_is_one_sentence(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 1
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be measured"):
        disk_rates("/nowhere", 2**20)
