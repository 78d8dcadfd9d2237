"""The classes on docs/extend.md train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_core.config.attention import ATTENTION_KINDS
from megatron_core.config.optimizers import OPTIMIZERS
from megatron_core.optimizer.algorithms import UPDATE_RULES
from megatron_core.training.step import train_step
from megatron_core.transformer.layer_spec import ATTENTION_LAYERS
from tests.runs import tiny_run

PAGE = Path(__file__).parents[2] / "docs/extend.md"


@pytest.mark.parametrize(
    ("heading", "settings"),
    [("An optimizer", {"optimizer": "adagrad"}), ("A kind of attention", {"attention_kind": "output_gate"})],
)
def test_registered_classes_train(heading: str, settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (ATTENTION_KINDS, ATTENTION_LAYERS, OPTIMIZERS, UPDATE_RULES):
        for name in ("adagrad", "output_gate"):
            monkeypatch.setitem(table, name, None)  # so that the entry is removed after the test
            del table[name]
    code = re.search(rf"\n## {heading}\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert code is not None
    exec(code[1], {"__name__": "page"})
    run = tiny_run(**settings)
    losses = [float(train_step(run).loss) for _ in range(3)]
    assert losses[2] < losses[0]
