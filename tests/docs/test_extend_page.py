"""The classes on docs/extend.md train."""

from __future__ import annotations

import importlib
import math
import re
import sys
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
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_config, tiny_run

PAGE = Path(__file__).parents[2] / "docs/extend.md"


def code_with(text: str) -> str:
    """The only block of code on the page that contains ``text``."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (code,) = (block for block in blocks if text in block)
    return code


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
    hooks = {field.name for field in fields(feature.Feature)} - {"name", "is_used"}
    assert listed == hooks


def test_the_feature_on_the_page_reports_its_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "_ADDED", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_training.py").write_text(code_with("class Noise("))
    importlib.import_module("my_training")
    run = tiny_run(label_noise=0.25)
    assert train_step(run).breakdown["label entropy"] == pytest.approx(math.log(4))
    with pytest.raises(ConfigError, match=r"label_noise=0.25 cannot be used with sft=True"):
        check(tiny_config(label_noise=0.25, sft=True), 1)


def _losses(folder: str, settings: dict) -> list[float]:
    """Losses and gradient norms of three steps with the products of the page, which are imported in a forked rank."""
    sys.path.insert(0, folder)
    importlib.import_module("my_products")
    run = tiny_run(**settings)
    results = [train_step(run) for _ in range(3)]
    return [value for result in results for value in (result.loss, result.grad_norm)]


def test_the_linear_layer_on_the_page_computes_the_same_in_every_layout(tmp_path: Path) -> None:
    """Also where the layer would pipeline the products of backward, which are not plain."""
    (tmp_path / "my_products.py").write_text(code_with("class GridProducts("))
    settings = {"fp64": True, "weight_grid": 2.0**-5, "seq_length": 16}
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    [alone] = run_ranks(1, _losses, str(tmp_path), settings)
    assert alone != run_ranks(1, _losses, str(tmp_path), settings | {"weight_grid": 0.0})[0]
    for chunks in (1, 2):
        for losses in run_ranks(2, _losses, str(tmp_path), settings | split | {"tp_comm_overlap_chunks": chunks}):
            assert losses == pytest.approx(alone, rel=1e-9)
