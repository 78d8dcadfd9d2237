"""docs/pipeline.md is correct: outputs equal the tool's, numbers the simulator's, and the example runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from megatron_core import feature
from megatron_core.commands.show_schedule import main
from megatron_core.config.cli import parse_run_config
from megatron_core.config.validate import problems
from megatron_core.features.pipeline_schedules.plan_file import plan_from_text
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.planner.simulate import Costs, peak_activations, simulate
from megatron_core.schedules import SCHEDULES, make_plan, schedules
from megatron_core.schedules.checks import check_plan
from megatron_core.verify.ranks import run_ranks
from tests.pipeline_parallel.chain import Chain, run_chain

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipeline.md").read_text()
COLUMNS = "100"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worked example as a module; its feature is registered for one test."""
    monkeypatch.setattr(feature, "_ADDED", {})
    path = tmp_path / "eager.py"
    path.write_text(re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1])
    spec = importlib.util.spec_from_file_location("eager", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(name: str, ranks: int, micros: int) -> None:
    """The schedule computes on this rank what one process computes."""
    plan = make_plan(name, ranks, 1, micros)
    whole = Chain(plan)
    losses = whole.reference()
    p2p = PipelineP2P(ParallelGroups(Grid(pp=ranks), dist.get_rank()))
    found, chain = run_chain(plan, p2p)
    assert found.keys() == (losses.keys() if p2p.index == ranks - 1 else set())
    for micro, loss in found.items():
        torch.testing.assert_close(loss, losses[micro])
    torch.testing.assert_close(chain.weights[p2p.index].grad, whole.weights[p2p.index].grad)


def test_the_worked_example(example: ModuleType) -> None:
    """One function and one row: checked, simulated, and run on four ranks."""
    for ranks, micros in [(1, 1), (2, 5), (4, 2), (4, 8), (8, 32)]:
        check_plan(make_plan("eager_1f1b", ranks, 1, micros), micros)
    slow = Costs(1, 1, 1, 0.25)
    eager, plain = (simulate(make_plan(name, 4, 1, 8), slow) for name in ("eager_1f1b", "1f1b"))
    assert eager.bubble < plain.bubble
    assert peak_activations(eager.plan) == (7, 5, 3, 1)
    run_ranks(4, _run, "eager_1f1b", 4, 6)


def test_outputs_are_the_tools(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", COLUMNS)
    blocks = re.findall(r"```console\n\$ python tools/show_schedule.py (.*?)\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 4
    for flags, output in blocks:
        assert main(shlex.split(flags)) == 0
        assert capsys.readouterr().out == output


def test_table_of_schedules() -> None:
    """Every schedule has its row; the last two cells are numbers for p = 4, m = 8."""
    found = re.findall(r"^\| `(\w+)`( in pairs)? \|(.*)\|$", PAGE, flags=re.MULTILINE)
    rows = {(name, bool(paired)): cells for name, paired, cells in found}
    every = {(name, False) for name in SCHEDULES if name != "forward_only"}
    assert set(rows) == every | {(name, True) for name in schedules(in_pairs=True)}
    for (name, paired), cells in rows.items():
        plan = make_plan(name, 4, SCHEDULES[name].chunks or 2, 8, paired=paired)
        *_, bubble, peak = (cell.strip() for cell in cells.split("|"))
        assert bubble == f"{100 * simulate(plan, Costs()).bubble:.1f} %"
        assert peak == f"{max(peak_activations(plan)):g}"


def test_plans_on_the_page_are_sound() -> None:
    plans = re.findall(r"```\n((?:stage_to_rank|\dF).*?)```", PAGE, flags=re.DOTALL)
    assert len(plans) == 2
    for text in plans:
        plan = plan_from_text(text.splitlines())
        assert check_plan(plan, 2).num_microbatches == 2


def test_the_traced_run_is_a_legal_one() -> None:
    """Its command equals that of ``make docs``."""
    (command,) = re.findall(r"^torchrun .* pretrain_gpt.py (.* --trace-pipeline .*)$", PAGE, flags=re.MULTILINE)
    config = parse_run_config(shlex.split(command))
    assert list(problems(config, 2)) == [] and config.monitor.trace_pipeline == "runs/trace"
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    assert command in " ".join(recipe.split())


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert len(pictures) == 2
    for picture in pictures:
        assert 10_000 < (ROOT / "docs" / picture).stat().st_size < 150_000
