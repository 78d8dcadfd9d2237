"""The contents of loss curves, not their style."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_core.errors import DataError
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports import plot as plot_module
from megatron_core.reports.plot import plot_loss
from tests.monitor.examples import step, validation

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch):
    """The created figures, to inspect their lines."""
    made = []
    new_figure = plot_module._new_figure

    def keep(*size):
        made.append(new_figure(*size))
        return made[-1]

    monkeypatch.setattr(plot_module, "_new_figure", keep)
    return made


def metrics(path, steps: int = 6):
    """A run that loses steps 4 and 5, and continues from 3 in another layout."""
    sink = JsonLinesSink(path)
    for iteration in (1, 2, 3, 4, 5):
        sink.on_step(step(iteration, loss=9.0 - iteration))
    for iteration in range(4, steps + 1):
        loss = math.nan if iteration == 5 else 3.0
        sink.on_step(step(iteration, loss=loss, layout="tp2"))
    sink.on_validation(validation(steps, loss=2.5))
    sink.close()
    return path


def test_the_picture_has_each_step_once_with_marks(tmp_path, figures):
    picture = tmp_path / "plots" / "loss.png"
    plot_loss(metrics(tmp_path / "metrics.jsonl"), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    loss_axes, rate_axes = figures[0].axes
    lines = {line.get_label(): line for line in loss_axes.get_lines()}
    assert list(lines["training"].get_xdata()) == [1, 2, 3, 4, 5, 6]
    values = list(lines["training"].get_ydata())
    assert values[:4] == [8.0, 7.0, 6.0, 3.0] and math.isnan(values[4])
    assert list(lines["not finite"].get_xdata()) == [5]
    assert list(lines["validation"].get_ydata()) == [2.5]
    assert [text.get_text().strip() for text in loss_axes.texts] == ["tp2"]
    assert [line.get_xdata()[0] for line in rate_axes.get_lines()][1:] == [4]
    assert rate_axes.get_xlabel() == "iteration"


def test_each_validation_set_has_a_curve(tmp_path, figures):
    path = metrics(tmp_path / "metrics.jsonl")
    sink = JsonLinesSink(path)
    for split in ("validation web", "validation code", "questions validation", "test"):
        sink.on_validation(validation(6, loss=3.5, split=split))
    sink.close()
    plot_loss(path, tmp_path / "loss.png")
    labels = [line.get_label() for line in figures[0].axes[0].get_lines()]
    assert [label for label in labels if "valid" in label] == ["validation", "validation web", "validation code"]


def test_several_runs_over_tokens_are_told_apart(tmp_path, figures):
    paths = [metrics(tmp_path / name / "metrics.jsonl") for name in ("a", "b")]
    plot_loss(paths, tmp_path / "loss.png", x="tokens")
    loss_axes, rate_axes = figures[0].axes
    labels = [line.get_label() for line in loss_axes.get_lines()]
    assert "a: training" in labels and "b: validation" in labels
    assert list(loss_axes.get_lines()[0].get_xdata())[:2] == [64, 128]
    assert rate_axes.get_xlabel() == "tokens"


def test_long_curves_are_smoothed_without_a_shift(tmp_path, figures):
    plot_loss(metrics(tmp_path / "m.jsonl", steps=300), tmp_path / "loss.png")
    loss_axes, _ = figures[0].axes
    pale, bold = loss_axes.get_lines()[:2]
    assert len(pale.get_xdata()) == len(bold.get_xdata()) == 300
    assert bold.get_ydata()[0] == 8.0 and bold.get_ydata()[-1] == 3.0
    assert not any(math.isnan(value) for value in bold.get_ydata())


def test_a_file_without_steps_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text("")
    with pytest.raises(DataError, match=r"m\.jsonl has no steps"):
        plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png")


def test_reading_metrics_needs_neither_matplotlib_nor_tensorboard():
    code = (
        "import sys, megatron_core.monitor, megatron_core.reports.plot, megatron_core.reports.metric_sinks;"
        "assert not {'matplotlib', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_tool_draws_and_says_what_is_wrong(tmp_path, capsys):
    from megatron_core.commands.plot_metrics import plot

    path = metrics(tmp_path / "metrics.jsonl")
    assert plot((str(path),), out=str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").exists()
    assert plot((str(tmp_path / "none.jsonl"),), out=str(tmp_path / "b.png")) == 1
    assert plot((), out=str(tmp_path / "b.png")) == 2
    assert "none.jsonl" in capsys.readouterr().err
