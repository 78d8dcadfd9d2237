"""The verdict of a comparison: what it includes, and every setting with another value or without a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_core.commands.verify_layout import LayoutOptions, main, task_of
from megatron_core.config import RunConfig
from megatron_core.config.run import settings
from megatron_core.config.setting import Resume
from megatron_core.errors import ConfigError
from megatron_core.planner.layout import Layout
from megatron_core.verify.comparison import OF_STAGES, configured, switches, without_switches
from megatron_core.verify.gpt import GPTExperiment
from megatron_core.verify.parity import check_parity
from megatron_core.verify.shrink import shrunk
from megatron_core.verify.together import incomparable
from tests.defects.plant import planted
from tests.parity.drawn_rows import row

MODEL = {"num_layers": 2, "num_attention_heads": 2}
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("number", range(40))
def test_no_setting_of_a_drawn_run_is_left_out_in_silence(number: int) -> None:
    """Each setting is compared with its value, listed with another one, listed as left out, or a word of a layout."""
    *_, flat = row(number)
    config = RunConfig.from_flat(flat)
    try:
        task = task_of(config, LayoutOptions(layouts=("dp2",)))
    except ConfigError as error:
        # Some models have no reference for this layout, and without ZeRO 3 this overlap needs the other dispatcher.
        reasons = "cannot be compared", "choose alltoall or remove --overlap-moe-expert-parallel-comm"
        assert any(reason in str(error) for reason in reasons), error
        return
    words = Layout().settings().keys() - OF_STAGES.keys()
    listed = task.changed.keys() | task.not_compared.keys() | words
    compared = [configured(task.config, layout, task.dtypes[-1], task.own_settings) for layout in task.layouts]
    given = config.flat()
    silent = {name for each in compared for name, value in each.flat().items() if value != given[name]} - listed
    assert silent == set()
    assert not task.changed.keys() & task.not_compared.keys()


def test_the_dtype_of_a_run_is_compared_too() -> None:
    options = LayoutOptions(layouts=("tp2",))
    for flags, dtypes in (({"bf16": True}, ["float64", "bfloat16"]), ({"fp16": True}, ["float64", "float16"])):
        task = task_of(RunConfig.from_flat(MODEL | flags), options)
        assert task.dtypes == dtypes
        assert not {"bf16", "fp16"} & task.changed.keys()
    assert task_of(RunConfig.from_flat(MODEL), options).dtypes == ["float64"]


def test_fp16_is_compared_with_bounds_of_float16() -> None:
    """The loss scale multiplies no error, and a wrong scale is found."""
    config = shrunk(RunConfig.from_flat(MODEL | {"fp16": True}), [Layout(tp=2)])
    experiment = GPTExperiment(config, 2, few_micro_batches=True)
    report = check_parity(experiment, ["tp2"], dtype="float16")
    assert report.holds
    assert all(row.gradient is not None and row.gradient.error < 0.1 for row in report.rows)
    with planted(
        "verify.trace:RankTrace.add_gradients", "_gradient_pieces(bucket, scale)", "_gradient_pieces(bucket, 1.0)"
    ):
        report = check_parity(experiment, ["tp2"], dtype="float16")
    assert report.rows[0].gradient is not None and report.rows[0].gradient.error > 100


def test_switches_are_settings_that_change_no_value() -> None:
    config = shrunk(RunConfig.from_flat(MODEL | FUSED | RECOMPUTED), [Layout(tp=2)])
    assert switches(config) == FUSED | RECOMPUTED | {"ddp_bucket_size": 3000}
    assert switches(without_switches(config)) == {"attention_backend": "unfused", "kernel_backend": "reference"}
    assert all(settings()[name].resume is Resume.FREE for name in FUSED | RECOMPUTED)


def test_a_fault_of_a_switch_in_every_layout_is_found() -> None:
    """One process with the switch has the same fault, so that a comparison with it finds nothing."""
    config = shrunk(RunConfig.from_flat(MODEL | FUSED), [Layout(tp=2)])
    fault = (
        "features.output_losses.chunked_loss:_LinearCrossEntropy.forward",
        "return losses.view",
        "return 1.01 * losses.view",
    )
    with planted(*fault):
        assert check_parity(GPTExperiment(config, 1), ["tp2"]).holds
        assert not check_parity(GPTExperiment(config, 1, plain_reference=True), ["tp2"]).holds
    assert check_parity(GPTExperiment(config, 1, plain_reference=True), ["tp2"]).holds


def test_parts_of_gradients_that_fp8_rounds_are_refused() -> None:
    groups = {"group_query_attention": True, "num_query_groups": 1, "fp8_format": "hybrid"}
    config = RunConfig.from_flat(MODEL | groups)
    assert "num_query_groups=1 and tp2" in (incomparable(config, Layout(tp=2)) or "")
    assert incomparable(config, Layout(dp=2)) is None
    assert incomparable(RunConfig.from_flat(MODEL | groups | {"num_query_groups": 2}), Layout(tp=2)) is None


STATE = "training.loading:_pieces_of_optimizer"
DEFECTS = {
    "the second moment is not loaded": (
        STATE,
        'state_name == "main" or not (',
        'state_name == "main" or state_name != "exp_avg_sq" and not (',
    ),
    "the average is not loaded": (
        STATE,
        'state_name == "main" or not (',
        'state_name == "main" or state_name != AVERAGE.name and not (',
    ),
    "a resume repeats a batch": (
        "training.loading:counters",
        "{name: value for",
        "{name: value - 8 if name == 'consumed_samples' else value for",
    ),
    "a resume repeats a step of the schedule": (
        "training.loading:counters",
        "{name: value for",
        "{name: value - 1 if name == 'iteration' else value for",
    ),
}
THOROUGH = ("--num-layers", "2", "--num-attention-heads", "2", "--steps", "1", "--ema-decay", "0.9", "--thorough")
THOROUGH += ("--lr-decay-style", "cosine", "--lr-warmup-iters", "3", "--lr", "1e-3", "--train-iters", "10")


def test_a_thorough_verdict_names_what_it_compares(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = ("--json", str(tmp_path / "report.json"), "--markdown", str(tmp_path / "page.md"))
    flags = ("--recompute-granularity", "selective", "--load-hf", "nowhere")
    status = main([*THOROUGH, *flags, "--layouts", "dp2 zero1", *files])
    text = capfd.readouterr().out
    assert status == 0, text
    report = json.loads((tmp_path / "report.json").read_text())
    assert {"optimizer state", "averaged weights", "evaluation"} <= set(report["compared"])
    assert report["missing"] == [] and report["not_compared"] == ["load_hf=nowhere"]
    assert "recompute_granularity=selective" in report["switches"]
    assert report["changed"]["adam_eps"] == ["1e-08", "0.001"]
    (on_files,) = report["further"]
    assert on_files["backend"] == report["backend"]
    rows = [row["layout"] for row in on_files["rows"]]
    assert rows == ["dp2 zero1 on files", "dp2 zero1 from 1 process", "1 process from dp2 zero1"]
    for line in ("compared with one process without: recompute_granularity", "adam_eps 1e-08 -> 0.001"):
        assert line in text and line in (tmp_path / "page.md").read_text()


def test_a_short_verdict_names_what_it_does_not_compare(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*THOROUGH[:6], "--layouts", "dp2"]) == 0
    text = capfd.readouterr().out
    assert "not compared: optimizer state, averaged weights, evaluation: add --thorough" in text
    assert "not compared: data loader, schedules to their end, checkpoints: add --thorough" in text


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_resuming_is_found(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with planted(*DEFECTS[name]):
        assert main([*THOROUGH, "--layouts", "dp2 zero1"]) == 1
    lines = capfd.readouterr().out.splitlines()
    verdicts = {line.split("  ")[0]: "FAILS" in line for line in lines if " on files" in line or " from " in line}
    assert verdicts["dp2 zero1 from 1 process"] and not verdicts["dp2 zero1 on files"]


THOROUGH_DEFECTS = {
    "an evaluation divides by the tokens of one replica": (
        "training.step:evaluate",
        "all_reduce_(totals, run.groups.group(WORLD))",
        "all_reduce_(totals[:1], run.groups.group(WORLD))",
    ),
    "a rank averages stale weights": (
        "optimizer.sharded:Optimizer._update_averages",
        "shard.state[AVERAGE.name]",
        "shard.state[AVERAGE.name] if self.shards[0].bucket.shard.start == 0 else shard.main.clone()",
    ),
}


@pytest.mark.parametrize("name", THOROUGH_DEFECTS)
def test_a_defect_beside_the_training_is_found(name: str) -> None:
    config = shrunk(RunConfig.from_flat(MODEL | {"ema_decay": 0.9}), [Layout(dp=2)])
    with planted(*THOROUGH_DEFECTS[name]):
        assert check_parity(GPTExperiment(config, 1), ["dp2 zero1"]).holds
        assert not check_parity(GPTExperiment(config, 1, thorough=True), ["dp2 zero1"]).holds
