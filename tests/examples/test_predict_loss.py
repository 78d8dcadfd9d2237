"""The loss of a larger model, predicted from smaller ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.predict_loss import Curve, Settings, Size
from megatron_core.errors import ConfigError
from megatron_core.features.presets.depth import settings_of_depth

ROOT = Path(__file__).parents[2]


def test_the_curve_of_exact_losses_is_found() -> None:
    computes = (1e12, 1e13, 1e14, 1e15)
    curve = Curve.through(computes, [1.2 + 300 * c**-0.2 for c in computes])
    assert curve.floor == pytest.approx(1.2, abs=0.01) and curve.exponent == pytest.approx(0.2, rel=0.02)
    assert curve.loss(1e17) == pytest.approx(1.2 + 300 * 1e17**-0.2, rel=1e-3)


def test_sizes_are_those_of_the_dial() -> None:
    for depth in (2, 6):
        size, settings = Size.of(depth, Settings(seq_length=2048)), settings_of_depth(depth)
        tokens = settings["global_batch_size"] * settings["train_iters"]
        assert size.width == settings["hidden_size"] and size.batch * size.steps == pytest.approx(tokens, rel=0.02)
        assert 2**-0.5 < size.batch / settings["global_batch_size"] < 2**0.5


@pytest.mark.parametrize("depths", [(1, 2, 3), (1, 2, 4, 3)])
def test_depths_without_a_prediction_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="give at least 4 in ascending order"):
        Settings(depths=depths)


@pytest.mark.whole_matrix
def test_the_whole_program(tmp_path: Path) -> None:
    flags = ["--depths", "1", "2", "3", "4", "--channels", "8", "--tokens-per-parameter", "2", "--seq-length", "32"]
    command = [sys.executable, "examples/predict_loss.py", *flags, "--corpus", "docs", "--output", str(tmp_path / "x")]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    page = (tmp_path / "x" / "table.md").read_text()
    assert page.count("\n| ") == 4 and "Depth 4: predicted" in page
