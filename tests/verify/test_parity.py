"""Comparison of whole trainings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch.distributed as dist

from megatron_core.config import RunConfig
from megatron_core.cpu_ranks.shared_memory.backend import expected
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.planner.layout import Layout
from megatron_core.verify import GPTExperiment, RankTrace, check_parity, shrunk
from megatron_core.verify.table import TerminalTable, layout_page, print_wrapped, summary_line

LAYOUTS = ["tp2 sp", "pp2 v2", "dp2 zero1 overlap"]


@dataclass(frozen=True)
class Sum:
    """Each rank has its part of one vector; ``wrong`` is added under tp."""

    wrong: float = 0.0
    crash: bool = False

    def __call__(self, layout: Layout, dtype: str) -> RankTrace:
        if self.crash and layout.tp > 1:
            raise ValueError("no such thing")
        rank, size = dist.get_rank(), dist.get_world_size()
        values = np.arange(8.0).astype("float32" if dtype != "float64" else dtype) / 3
        values = values.astype(np.float64) + self.wrong * (layout.tp > 1)
        box = slice(rank * 8 // size, (rank + 1) * 8 // size)
        return RankTrace([1.0], [2.0], [("weight.a", (8,), (box,), values[box])])


def test_rows_and_verdict() -> None:
    heard = []
    report = check_parity(Sum(), ["tp2", "dp4"], on_row=heard.append)
    assert report.holds
    assert [(row.layout, row.ranks, row.holds) for row in report.rows] == [("tp2", 2, True), ("dp4", 4, True)]
    assert heard == report.rows
    assert summary_line(report).startswith(f"2 of 2 layouts hold in float64 over {expected()}")
    over_gloo = check_parity(Sum(), ["tp2"], backend="gloo")
    assert over_gloo.holds and over_gloo.backend == "gloo"


def test_one_wrong_layout_is_named_and_the_others_are_not() -> None:
    report = check_parity(Sum(wrong=1e-6), ["tp2", "dp2"])
    assert [row.holds for row in report.rows] == [False, True]
    assert not report.holds
    assert report.rows[0].faults == ("weight.a is off by 4.3e-07 (allowed: 1.0e-09)",)
    assert report.rows[0].weight.where == "weight.a"


def test_a_layout_that_cannot_run_is_a_row() -> None:
    report = check_parity(Sum(crash=True), ["tp2", "dp2"])
    assert report.rows[0].faults == ("fails: ValueError: no such thing",)
    assert [row.holds for row in report.rows] == [False, True]


def test_no_layout_is_no_parity() -> None:
    assert not check_parity(Sum(), []).holds


def test_narrow_dtypes_are_measured_against_one_process() -> None:
    report = check_parity(Sum(), ["tp2"], dtype="float32")
    assert [row.layout for row in report.rows] == ["1 process", "tp2"]
    assert report.holds
    assert report.rows[1].weight == report.rows[0].weight
    assert 0 < report.rows[0].weight.error < 2.0**-23
    assert "1 of 1 layouts" in summary_line(report)


def test_an_error_far_beyond_rounding_is_found_in_a_narrow_dtype() -> None:
    assert not check_parity(Sum(wrong=1e-6), ["tp2"], dtype="float32").holds


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match=r"dtype=float8 .* legal: float64, float32, bfloat16"):
        check_parity(Sum(), ["tp2"], dtype="float8")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gpt(dtype: str) -> None:
    layouts = [Layout.parse(text) for text in LAYOUTS]
    config = shrunk(RunConfig.from_flat({"num_layers": 4, "num_attention_heads": 4}), layouts)
    report = check_parity(GPTExperiment(config, steps=2, few_micro_batches=True), layouts, dtype=dtype)
    assert [fault for row in report.rows for fault in row.faults] == []
    worst = max(row.gradient.error for row in report.rows)
    assert 0.0 < worst < {"float64": 1e-12, "float32": 1e-4, "bfloat16": 1.0}[dtype]


@dataclass(frozen=True)
class Still(Sum):
    """A constant loss."""

    loss: float = 1.0

    def __call__(self, layout: Layout, dtype: str) -> RankTrace:
        zeros = np.zeros(2)
        return RankTrace([self.loss], [0.0], [(f"grad{step}.a", (2,), (slice(0, 2),), zeros) for step in range(2)])


def test_what_would_show_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="the gradients of a are 0 in every step"):
        check_parity(Still(), ["tp2"])
    with pytest.raises(ConfigError, match=r"the losses are \[nan\]"):
        check_parity(Still(loss=float("nan")), ["tp2"])


def test_a_slip_in_the_last_layout_is_told_before_the_first_runs() -> None:
    heard = []
    with pytest.raises(LayoutError, match="tpx"):
        check_parity(Sum(), ["tp2", "tpx"], on_row=heard.append)
    assert heard == []


def test_tables_have_a_line_for_each_row_and_name_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    report = check_parity(Sum(wrong=0.5), ["tp2", "dp2"])
    table = TerminalTable(["tp2", "dp2"], "float64")
    lines = [line for row in report.rows for line in table.lines(row)]
    verdicts = [line.split()[-2] for line in lines if not line.startswith(" ")]
    assert verdicts == ["FAILS", "holds"]
    assert sum("weight.a is off by 2.1e-01" in line for line in lines) == 1
    print_wrapped("word " * 50)
    wrapped = capsys.readouterr().out.splitlines()
    assert len(wrapped) == 3 and max(map(len, wrapped)) <= 100
    table_rows = [line for line in layout_page(report, "a sum") if line.startswith("|")]
    assert len(table_rows) == 4
    assert len({line.count("|") for line in table_rows}) == 1
