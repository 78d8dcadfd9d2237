"""The classes on docs/extend.md train."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_core import feature
from megatron_core.config.attention import ATTENTION_KINDS
from megatron_core.config.optimizers import OPTIMIZERS
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.training.step import train_step
from megatron_core.transformer.layer_spec import ATTENTION_LAYERS
from tests.runs import tiny_config, tiny_run

PAGE = Path(__file__).parents[2] / "docs/extend.md"


@pytest.mark.parametrize(
    ("heading", "settings"),
    [("An optimizer", {"optimizer": "adagrad"}), ("A kind of attention", {"attention_kind": "output_gate"})],
)
def test_registered_classes_train(heading: str, settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (ATTENTION_KINDS, ATTENTION_LAYERS, OPTIMIZERS):
        for name in ("adagrad", "output_gate"):
            monkeypatch.setitem(table, name, None)  # so that the entry is removed after the test
            del table[name]
    code = re.search(rf"\n## {heading}\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert code is not None
    exec(code[1], {"__name__": "page"})
    run = tiny_run(**settings)
    losses = [float(train_step(run).loss) for _ in range(3)]
    assert losses[2] < losses[0]


def test_the_page_lists_every_hook() -> None:
    table = PAGE.read_text(encoding="utf-8").split("### What a feature can add")[1].split("\n\n")[1]
    listed = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    hooks = {field.name for field in fields(feature.Feature)} - {"name", "settings", "is_used"}
    assert listed == hooks


def test_the_feature_on_the_page_reports_its_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
        if "register_feature" in block
    )
    (tmp_path / "my_training.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(feature, "_ADDED", {})
    importlib.import_module("my_training")
    run = tiny_run(label_noise=0.25)
    assert train_step(run).breakdown["label entropy"] == pytest.approx(math.log(4))
    with pytest.raises(ConfigError, match=r"label_noise=0.25 cannot be used with sft=True"):
        check(tiny_config(label_noise=0.25, sft=True), 1)
