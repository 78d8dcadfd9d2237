"""The command that compares layouts with one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest

from megatron_core.commands.verify_layout import LayoutOptions, main, task_of
from megatron_core.config.cli import parse_run_config
from megatron_core.verify import BitsReport, BitsRow
from megatron_core.verify.table import bits_page

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--num-layers", "2", "--num-attention-heads", "2", "--steps", "1")


@dataclass
class Result:
    """The results of a run of the command."""

    status: int
    stdout: str
    stderr: str


Verify = Callable[..., Result]


@pytest.fixture
def verify(capfd: pytest.CaptureFixture[str]) -> Verify:
    """The command in this process; its ranks are forked."""

    def call(*args: str) -> Result:
        try:
            status = main(list(args))
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        written, errors = capfd.readouterr()
        # Long lines are continued after four blanks.
        return Result(status, written.replace("\n    ", " "), errors)

    return call


def test_bits_name_the_first_difference(verify: Verify, tmp_path: Path) -> None:
    """Sums over data-parallel ranks have another order than those of one process."""
    result = verify(*SMALL, "--bits", "--layouts", "dp2", "tp2", "--json", str(tmp_path / "report.json"))
    assert result.status == 1, result.stderr
    assert "1 step in float32 on cpu; all bits are compared" in result.stdout
    assert "dp2  iteration 1: " in result.stdout
    assert (
        "tp2  iteration 1: the gradient of decoder.final_layernorm.bias differs first, in the module" in result.stdout
    )
    assert "0 of 2 layouts have the bits of one process in float32" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["holds"] is False and report["rows"][1]["difference"]["quantity"] == "gradients"


def test_layout_invariant_training_has_equal_bits(verify: Verify) -> None:
    result = verify(*SMALL, "--bits", "--dtype", "bfloat16", "--layout-invariant", "--layouts", "dp2 zero3", "tp2 sp")
    assert result.status == 0, result.stdout + result.stderr
    assert "2 of 2 layouts have the bits of one process in bfloat16" in result.stdout


def test_the_page_of_equal_bits_has_refused_layouts(tmp_path: Path) -> None:
    """With 2 heads in parts and 2 chunks, cp2 needs more chunks."""
    options = LayoutOptions(all=True, world_size=(2,), bits=True)
    flags = [*SMALL[:4], "--layout-invariant", "--layout-invariant-chunks", "2"]
    task = task_of(parse_run_config(flags), options)
    assert {str(layout) for layout in task.layouts} >= {"tp2 sp", "dp2 zero3", "pp2"}
    assert {name.split()[0] for name in task.refused} == {"cp2"}
    assert all("layout_invariant_chunks=2" in reason for reason in task.refused.values())
    rows = [BitsRow("tp2", 2, 1.0), BitsRow("dp2", 2, 1.0, faults=("fails: out of memory",))]
    text = "\n".join(bits_page(BitsReport("float32", "shared memory", 5, rows), "tiny model", task.refused))
    assert text.startswith("# Layouts with the bits of one process\n\nTiny model.\n\n1 of 2 layouts have the bits")
    assert "1 of 2 layouts: `tp2`." in text and "- `dp2` differs: fails: out of memory" in text
    assert f"{len(task.refused)} layouts are refused" in text and "`cp2`, `cp2 zero1 overlap`" in text


def test_layouts_in_words(verify: Verify, tmp_path: Path) -> None:
    result = verify(*SMALL, "--layouts", "tp2 sp", "pp2", "--json", str(tmp_path / "report.json"))
    assert result.status == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if "  holds  " in line]
    assert [row[:2] for row in rows] == [["tp2", "sp"], ["pp2", "2"]]
    assert all("holds" in row for row in rows)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["holds"] is True
    assert report["dtype"] == "float64"
    assert [row["layout"] for row in report["rows"]] == ["tp2 sp", "pp2"]
    assert report["rows"][0]["gradient"]["error"] < 1e-12


def test_the_verdict_names_what_is_left_out(verify: Verify, tmp_path: Path) -> None:
    """Also in both files; what can be compared is."""
    files = ("--json", str(tmp_path / "report.json"), "--markdown", str(tmp_path / "page.md"))
    left_out = ("--grad-compression", "powersgd", "--load-hf", "/nowhere", "--eod-mask-loss", "--data-path", "a")
    ramp = ("--rampup-batch-size", "8", "8", "99", "--global-batch-size", "32", "--lr-warmup-iters", "9")
    sizes = ("--num-layers", "2", "--num-attention-heads", "2", "--steps", "2")
    result = verify(*sizes, *left_out, *ramp, "--layouts", "pp2", *files)
    names = ["grad_compression=powersgd", "data_path=('a',)", "load_hf=/nowhere"]
    assert result.status == 0, result.stderr + result.stdout
    assert f"not compared: {', '.join(names)}" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["not_compared"] == names
    assert f"not compared: {', '.join(names)}." in (tmp_path / "page.md").read_text()


def test_every_layout_of_a_world(verify: Verify) -> None:
    result = verify(*SMALL, "--all", "--world-size", "2", "--dtype", "float32")
    assert result.status == 0, result.stderr + result.stdout
    assert "14 of 14 layouts hold in float32" in result.stdout  # tp2, tp2 sp, pp2; dp2 and cp2 with ZeRO, overlap
    assert result.stdout.splitlines()[2].startswith("1 process")


def test_a_sample_has_every_pair_of_sizes_and_switches() -> None:
    options = LayoutOptions(all=True, world_size=(4,))
    flags = ["--num-layers", "2", "--num-experts", "4", "--swiglu", "--disable-bias-linear"]
    every, some = (task_of(parse_run_config(flags), replace(options, pairwise=p)).layouts for p in (False, True))
    pairs = [{pair for each in layouts for pair in combinations(vars(each).items(), 2)} for layouts in (every, some)]
    assert set(some) <= set(every) and len(some) < len(every) / 3
    assert pairs[0] == pairs[1]


def test_the_flags_of_a_run_describe_its_layout(verify: Verify) -> None:
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--normalization", "RMSNorm")
    result = verify(*SMALL, *flags, "--world-size", "4", "--use-distributed-optimizer")
    assert result.status == 0, result.stderr
    assert "\ntp2 dp2 sp zero1 " in result.stdout


def test_a_config_file_describes_the_model(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("num_layers: 3\nnum_attention_heads: 4\nhidden_size: 512\n")
    result = verify("--config", str(tmp_path / "run.yaml"), "--steps", "1", "--layouts", "pp3")
    assert result.status == 0, result.stderr
    assert "3 layers, hidden size 32, 4 heads" in result.stdout


def test_what_the_small_model_has_and_the_given_one_has_not_is_said(verify: Verify) -> None:
    result = verify(
        "--num-layers", "2", "--num-attention-heads", "6", "--hidden-size", "48", "--steps", "1", "--layouts", "tp4"
    )
    assert result.status == 0
    assert "note: the full-size model cannot be trained in 'tp4' (num_attention_heads=6" in result.stdout


def test_the_stages_of_a_run_are_checked_as_they_are(verify: Verify) -> None:
    """All four layers on the first rank except one; --layouts ignores this, with a note."""
    flags = ("--num-layers", "4", "--steps", "1", "--pipeline-model-parallel-size", "2")
    flags += ("--pipeline-model-parallel-layout", "Ettt|tL")
    assert verify(*flags).status == 0
    note = "pipeline_model_parallel_layout=Ettt|tL is ignored"
    assert note in verify(*flags, "--layouts", "tp2").stdout
    options, given = LayoutOptions(steps=1), parse_run_config(list(flags[:2] + flags[4:]))
    assert task_of(given, options).own_settings["pipeline_model_parallel_layout"] == "Ettt|tL"
    chunks = [*flags[:2], *flags[4:6], "--pipeline-model-parallel-layout", "Et|t|tt|L"]
    assert str(task_of(parse_run_config(chunks), options).layouts[0]) == "pp2 v2"


def test_the_overlap_of_a_run_is_checked_as_it_is() -> None:
    """The name of a layout would also enable early gathers of parameters."""
    flags = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
    task = task_of(parse_run_config(flags), LayoutOptions(world_size=(2,)))
    assert (task.own_settings["overlap_grad_reduce"], task.own_settings["overlap_param_gather"]) == (True, False)


def test_a_plan_of_ones_own_is_checked_at_full_size(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    flags = ("--pipeline-model-parallel-size", "2", "--pipeline-plan", str(tmp_path / "plan.txt"))
    assert "add --full-size" in verify(*flags).stderr
    full = ("--full-size", "--vocab-size", "64", "--global-batch-size", "2", "--seq-length", "8", "--steps", "1")
    assert verify(*flags, *full).status == 0


def test_a_model_that_one_process_cannot_train(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **named: object) -> None:
        raise ValueError("out of order")

    monkeypatch.setattr("megatron_core.verify.gpt.train_traced", broken)
    result = verify(*SMALL, "--layouts", "tp2")
    assert result.status == 1
    assert "training in one process failed" in result.stderr and "out of order" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no layout to check"),
        (("--layouts", "tp2 cq4"), "legal: tpN"),
        (("--layouts", "tp2", "--all"), "--all and --layouts exclude each other"),
        (("--all",), "--all needs --world-size"),
        (("--all", "--world-size", "1"), "no layout of --world-size 1 fits"),
        (("--layouts", "tp2 dp2", "--world-size", "8"), "'tp2 dp2' has 4 ranks, but --world-size is 8"),
        (("--layouts", "tp2", "pp2", "--world-size", "2", "4"), "several values of --world-size need --all"),
        (("--layouts", "v2"), "layout 'v2' cannot be trained"),
        (("--layouts", "tp2", "--json", "/dev/null/report.json"), "/dev/null/report.json: nothing can be written"),
        (("--layouts", "tp2", "--pairwise"), "--pairwise samples the layouts of --all"),
        (("--layouts", "tp2", "--steps", "0"), "--steps 0 is too small"),
        (("--world-size", "2", "4"), "several values of --world-size need --all"),
        (("--layouts", "tp2", "--num-attention-heads", "3", "--vocab-size", "9", "--full-size"), "num_attention_heads"),
        (("--layouts", "tp2", "--no-such-flag"), "no-such-flag"),
        (("--layouts", "tp11", "tp13"), "give 'tp11', 'tp13' in separate commands"),
        (("--layouts", "dp8", "--num-distributed-optimizer-instances", "2"), "has no effect without --zero-stage"),
    ],
)
def test_wrong_command_lines(verify: Verify, args: tuple[str, ...], message: str) -> None:
    result = verify(*args)
    assert result.status == 2
    assert message in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


def test_help_names_every_option_and_the_words() -> None:
    """Also as a separate program."""
    command = [sys.executable, "tools/verify_layout.py", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("--layouts", "--all", "--world-size", "--dtype", "--json", "--full-size", "zero1", "pretrain_gpt.py"):
        assert word in shown


def test_a_large_world_is_simulated(verify: Verify) -> None:
    """The number of ranks gives dp; x2 is another name of v2; 9 samples are not two equal micro-batches."""
    flags = ("--num-layers", "9", "--num-attention-heads", "64", "--hidden-size", "512", "--steps", "1")
    result = verify(*flags, "--layouts", "tp2 pp2 x2 sp zero1", "--world-size", "12")
    assert result.status == 0, result.stderr + result.stdout
    assert "\ntp2 pp2 v2 dp3 sp zero1     12 " in result.stdout
    assert "12 simulated ranks: " in result.stdout and "over simulated ranks" in result.stdout
    assert "compared with other values: hidden_size 512 -> 64, num_attention_heads 64 -> 8" in result.stdout
    assert "seq_length 64 -> 16" in result.stdout


@pytest.mark.parametrize(
    ("example", "ranks", "layers", "layout"),
    [
        ("deepseek_v3", 1024, 61, "pp16 dp64 ep64 zb_v zero1 overlap"),
        ("gpt3_175b", 1024, 48, "tp8 pp16 v3 dp8 sp zero1 overlap"),
        ("llama3_405b", 1024, 126, "tp8 pp16 v8 dp8 sp zero2 overlap"),
        ("mixtral_8x22b", 128, 8, "tp2 pp8 dp8 ep8 etp1 sp zero1 overlap"),
        ("qwen3_235b_a22b", 128, 14, "tp2 pp8 dp8 ep8 etp1 sp zero1 overlap"),
    ],
)
def test_published_layouts_are_kept(example: str, ranks: int, layers: int, layout: str) -> None:
    """Stages, experts on a rank and key-value groups on a rank remain as (un)equal as they are."""
    config = parse_run_config(["--config", str(ROOT / "examples" / f"{example}.yaml")])
    task = task_of(config, LayoutOptions(world_size=(ranks,)))
    (found,) = task.layouts
    small, large = task.config.model, config.model
    assert (small.num_layers, " ".join(sorted(str(found).split()))) == (layers, " ".join(sorted(layout.split())))
    assert small.num_experts is None or (small.num_experts > found.ep) == ((large.num_experts or 0) > found.ep)
    assert (large.num_query_groups or 8) % found.tp or (small.num_query_groups or 8) % found.tp == 0


def test_graphs_of_simulated_ranks_are_refused(verify: Verify) -> None:
    result = verify(*SMALL, "--compile", "--layouts", "tp2", "--device", "simulated")
    assert result.status == 2
    assert "compile=True cannot be checked with simulated ranks" in result.stderr
    assert "--device cpu" in result.stderr
