"""The report of a run: every section, escaped, well-formed, without network."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_core.commands.report import main
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports.meter import Traffic
from megatron_core.reports.metrics import read_run
from megatron_core.reports.page import COLOURS, bars, chart, html_table, three_digits
from megatron_core.reports.report import report, write_report
from megatron_core.reports.summary import RunSummary
from megatron_core.training.loop import train
from megatron_core.verify.ranks import run_ranks
from tests.monitor.examples import validation
from tests.reports.planted import write_run
from tests.runs import tiny_run

SECTIONS = [
    "summary", "diagnosis", "loss", "throughput", "time", "memory", "collectives", "imbalance", "pipeline", "experts",
    "goodput", "config",
]  # fmt: skip
XHTML = "{http://www.w3.org/1999/xhtml}"


def _sections(text: str) -> dict[str, str]:
    """The text of each section, of a page that must be well-formed."""
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    return {section.attrib["id"]: " ".join(section.itertext()) for section in root.iter(f"{XHTML}section")}


def _charts(text: str) -> list[dict[str, Any]]:
    """The data of the charts of a page."""
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    return [json.loads(element.attrib["data-chart"]) for element in root.iter() if "data-chart" in element.attrib]


def _gaps(text: str) -> int:
    """The number of gaps in the curves of a page."""
    return sum(curve["points"][1].count(None) for chart in _charts(text) for curve in chart["curves"])


def _run(folder: Path, **changes: object) -> Path:
    sent = [{"dp all_reduce": Traffic(4, 1e9, 0.1, 0.1)}] * 2
    settings = {"data_path": "<script>alert('&')</script>"} | changes
    memory = {"weights": 2**20, "peak": 2**30, "current": 2**29}
    loads = {0: [100, 100, 1, 0], 2: [50, 60, 90, 3]}
    parts = {f"{norm} by layer/{part}": 0.5 for norm in ("grad-norm", "params-norm") for part in ("layer 0", "head")}
    parts |= {"lm loss by source/<books>": 2.0, "grad-norm by layer/head": math.nan}
    write_run(
        folder, [{"forward": 0.1, "backward": 0.2, "odd <phase>": 0.01}] * 2, traffic=sent, config=settings,
        memory=memory, expert_load=loads, breakdown=parts,
    )  # fmt: skip
    sink = JsonLinesSink(folder / "metrics.jsonl")
    sink.on_validation(validation(6, split="validation web"))
    sink.close()
    return folder


def test_every_section_is_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, b = _run(tmp_path / "a"), _run(tmp_path / "b", num_workers=7)
    out = tmp_path / "new" / "report.html"
    assert main([str(a), "--compare", str(b), "--out", str(out)]) == 0
    text = out.read_text()
    found = _sections(text)
    without_pipeline = [name for name in SECTIONS[:-1] if name != "pipeline"]
    assert list(found) == [*without_pipeline, "comparison", "config"], "a section without content is left out"
    assert text.count("<script") == 1 and "<script>alert" not in text, "only that of the charts"
    assert "odd <phase>" in found["time"], "text is escaped"
    assert not re.search(r"(src|href)=\"(?!#|data:)", text) and "url(" not in text, "nothing is loaded"
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|eval\(", text), "nothing is loaded"
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "width=device-width" in text
    assert found["comparison"].split()[-3:] == ["num_workers", "2", "7"]
    assert "rank 1" in found["imbalance"] and "dp all_reduce" in found["collectives"]
    assert any(curve["name"] == "<books>" for chart in _charts(text) for curve in chart["curves"])
    assert "layer 0 0.500 0.500 1.00" in " ".join(found["loss"].split())
    loss = next(chart for chart in _charts(text) if chart["y"] == "loss per token")
    assert {"training", "training of b", "validation web"} <= {curve["name"] for curve in loss["curves"]}
    assert "head nan 0.500 nan" in " ".join(found["loss"].split())
    assert "exposed communication over dp" in found["diagnosis"] and "weights" in found["memory"]
    assert text.count("<img") == 1 and "data:image/png;base64," in text, "the heat map of the experts"
    assert main([str(tmp_path / "nowhere"), "--out", str(out)]) == 1
    assert "has no records" in capsys.readouterr().err


def test_records_that_are_missing_are_said(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a")
    (folder / "metrics.ranks" / "rank00000.jsonl").unlink()
    found = _sections(report(folder))
    assert "records of 1 of 2 ranks are missing (0)" in found["summary"] and "unknown" in found["config"]
    (folder / "metrics.ranks" / "rank00001.jsonl").unlink()
    assert "there is no breakdown of time" in _sections(report(folder))["summary"]


def test_several_runs_and_layouts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each run has its name; rates of different layouts are not connected."""
    folders = [_run(tmp_path / name / "run") for name in "abc"]
    out = tmp_path / "report.html"
    assert main([str(folders[0]), "--compare", *map(str, folders[1:]), "--out", str(out)]) == 0
    text = out.read_text()
    rows = " ".join(_sections(text)["comparison"].split())
    write_report(folders[0], tmp_path / "two.html", folders[1])  # a single one
    assert "training of b/run" in (tmp_path / "two.html").read_text()  # in the data of a chart
    assert "this run b/run c/run step (ms)" in rows and "The same settings." in rows
    assert "tokens per second of" not in text and "training of b/run" in text
    metrics = folders[0] / "metrics.jsonl"
    records = [json.loads(line) | {"utilisation": 0.5, "goodput": 0.9} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    before = _gaps(report(folders[0]))
    for record in records[len(records) // 2 :]:
        record["layout"] = "dp2 <zero1>"
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    text = report(folders[0])
    marked = {chart["y"] for chart in _charts(text) for _, layout in chart["marks"] if layout == "dp2 <zero1>"}
    assert marked == {"loss per token", "tokens per second", "utilisation (%)", "goodput (%)"}
    assert _gaps(text) == before + 2, "gaps in tokens per second and utilisation"


def _trained(folder: str) -> None:
    run = tiny_run(
        pipeline_model_parallel_size=2, train_iters=3, eval_iters=1, save=folder, trace_pipeline=f"{folder}/trace"
    )
    sinks = [JsonLinesSink(Path(folder) / "metrics.jsonl")] if run.world.rank == 0 else []
    train(run, sinks)


def test_a_real_run_with_a_pipeline(tmp_path: Path) -> None:
    run_ranks(2, _trained, str(tmp_path))
    text = report(tmp_path)
    found = _sections(text)
    assert list(found) == [name for name in SECTIONS if name != "experts"], "an empty section is left out"
    assert "measured" in found["pipeline"] and text.count("<img") == 1
    assert "pp send" in found["collectives"] and "useful" in found["goodput"]


def test_numbers_and_charts() -> None:
    assert [three_digits(x) for x in (0.0, 12.345, 0.5, 1234567.0, 7, "a", float("nan"))] == [
        "0", "12.3", "0.500", "1.23e+06", "7", "a", "nan",
    ]  # fmt: skip
    assert 'class="n"' in html_table(("a",), [(1.5,)]) and "&lt;" in html_table(("a",), [("<",)])
    assert "data-chart" not in chart({}, "x", "y") and "data-chart" not in chart({"a": [(1, math.nan)]}, "x", "y")
    drawn = chart({"a": [(1, 1.0), (2, math.nan), (24, 2.0)]}, "x", "<y>", [(13, "<tp2>")])
    element = ElementTree.fromstring(drawn)
    colour = COLOURS[0]
    assert json.loads(element.attrib["data-chart"]) == {
        "x": "x",
        "y": "<y>",
        "curves": [{"name": "a", "colour": colour, "points": [[1, 2, 24], [1.0, None, 2.0]]}],
        "marks": [[13, "<tp2>"]],
    }
    assert "width:50.000%" in bars({"a": {"x": 1.0, "y": 1.0}, "b": {"x": 1.0}}, "s")


def test_gpus_and_scaling(tmp_path: Path) -> None:
    """Utilisation and fragments of each GPU; the waiting of one run, and the rate of a rank in two."""
    sent = {"dp all_reduce": Traffic(1, 1e6, 0.25, 0.3)}
    gpu = {"reserved": 3 * 2**30, "fragments": 0.125, "busy": 0.9}
    memory = {"weights": 2**30, "peak": 2**31, "current": 2**30}
    large = write_run(
        tmp_path / "large",
        [{"forward": 0.75}] * 4,
        traffic=[sent] * 4,
        memory=memory,
        gpu=gpu,
        tokens_per_second=3000.0,
    )
    unmeasured = {"reserved": 1.0, "fragments": 0.0}
    small = write_run(
        tmp_path / "small", [{"forward": 1.0}] * 2, memory=memory, gpu=unmeasured, tokens_per_second=2000.0
    )
    text = report(large, small)
    for words in (three_digits(3072.0), "12.5%", "90%", "scaling efficiency from 2 ranks", "75.0%", "100.0%"):
        assert words in text, words
    assert RunSummary.of(read_run(large)).scaling_efficiency == pytest.approx(0.75)
    assert "not measured: pip install nvidia-ml-py" in report(small)
    assert "GPU busy" not in report(write_run(tmp_path / "cpu", [{"forward": 1.0}], memory=memory))
