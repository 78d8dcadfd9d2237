"""The metrics file of Prometheus, and the alerts and the dashboard of `examples/monitoring` that read its metrics."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from megatron_core.reports.metric_sinks import PrometheusSink
from tests.monitor.examples import step, validation

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"


def written(folder: Path, name: str = "run.prom") -> str:
    """The file of a run with all kinds of metrics."""
    sink = PrometheusSink(folder / name, start_iteration=2)
    assert (folder / name).read_text().endswith("} 2.0\n")
    phases = {"forward": 0.5, "tp all_reduce": 0.25}
    load = {1: (8, 8, 8, 8, 0), 2: (20, 10, 1, 1, 0)}
    rate = {"goodput": 0.5, "product_rate": 5e12, "memory": {"weights": 7, "peak": 9}}
    sources = {"lm loss by source/a-b": 1.0, "lm loss by source/a b": 2.0}
    sink.on_step(step(3, loss=math.nan, phases=phases, expert_load=load, breakdown=sources, **rate))
    sink.on_validation(validation(3))
    return (folder / name).read_text()


def test_series_have_labels_and_are_different(tmp_path: Path) -> None:
    """Equal series in the files of two runs, or in one file, would be dropped by the node exporter."""
    text = written(tmp_path)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines())
    assert len(values) == len(text.splitlines())
    assert all(re.fullmatch(r'megatron_[a-z_]+\{run="run"(,part="[^"]+")?\}', series) for series in values)
    assert values['megatron_iteration{run="run"}'] == "3.0" and values['megatron_lm_loss{run="run"}'] == "NaN"
    assert values['megatron_time{run="run",part="tp all_reduce"}'] == "0.25"
    assert [values[f'megatron_lm_loss_by_source{{run="run",part="{name}"}}'] for name in ("a-b", "a b")] == [
        "1.0",
        "2.0",
    ]
    # of layer 2: 20 of 32, one of 32
    assert float(values['megatron_expert_load_max_over_mean{run="run"}']) == 2.5
    assert float(values['megatron_expert_load_min_over_mean{run="run"}']) == 0.125
    shares = [20 / 32, 10 / 32, 1 / 32, 1 / 32]
    entropy = -sum(share * math.log(share, 4) for share in shares)
    assert float(values['megatron_expert_load_entropy{run="run"}']) == pytest.approx(entropy)


def test_characters_of_a_file_name_are_escaped(tmp_path: Path) -> None:
    assert 'megatron_iteration{run="a\\"b\\\\c"} 3.0' in written(tmp_path, 'a"b\\c.prom')


def test_alerts_and_panels_read_metrics_that_exist(tmp_path: Path) -> None:
    existing = set(re.findall(r"^megatron_\w+", written(tmp_path), re.MULTILINE))
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    dashboard = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in expressions:
        names = set(re.findall(r"megatron_\w+", expression))
        assert names and names <= existing, expression
    assert {rule["alert"] for rule in rules} >= {"MegatronStalled", "MegatronLossSpike", "MegatronExpertCollapse"}


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    cells = [
        {(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
        for p in (panel["gridPos"] for panel in dashboard["panels"])
    ]
    assert all(first.isdisjoint(second) for first, second in combinations(cells, 2))
    assert all("$run" in target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize(
    "words", ["check config prometheus.yaml", "check rules alerts.yaml", "test rules alerts_test.yaml"]
)
def test_promtool_accepts_the_files(words: str) -> None:
    done = subprocess.run(["promtool", *words.split()], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
