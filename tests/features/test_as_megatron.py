"""The list of differences from a training of Megatron-LM, and the switch that removes them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.features.as_megatron.differences import training_differences
from megatron_core.parallel import World
from megatron_core.reports.dry_run import describe_rank
from megatron_core.training.pretrain import notes
from megatron_core.training.setup import set_up

START = "differs from Megatron-LM: "
CONSTANT = "--lr-decay-style constant --data-order megatron"
LAUNCH = "--mock-data --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 128 "
ALL = "--eod-mask-loss --num-experts 4 --moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1.0 --decoupled-lr 1e-3"
LATER = "--mtp-num-layers 1 --num-experts 4 --position-embedding-type rope"
SETTINGS = {
    "openai_gelu": True,
    "lr_one_step_later": True,
    "positions_as_matrices": True,
    "data_order": "megatron",
    "calculate_per_token_loss": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_capacity_per": "micro_batch",
}


def parsed(flags: str) -> RunConfig:
    return parse_run_config(f"{LAUNCH} {flags}".split())


def chosen(config: RunConfig) -> dict[str, Any]:
    return {name: value for difference in training_differences(config) for name, value in difference.settings.items()}


def test_the_switch_removes_every_difference_with_a_setting() -> None:
    assert chosen(parsed(ALL)) == SETTINGS
    config = parsed(f"{ALL} --as-megatron")
    assert {name: config.flat()[name] for name in SETTINGS} == SETTINGS
    assert chosen(config) == {}
    left = ["experts of tokens without loss", "initial weights and dropout masks"]
    assert [difference.name for difference in training_differences(config)] == left
    assert parsed(f"{ALL} --as-megatron --no-as-megatron") == parsed(ALL)


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        ("--no-bias-gelu-fusion", "openai_gelu", False),
        ("--swiglu", "openai_gelu", False),
        ("--data-order keyed", "data_order", "keyed"),
        ("--no-lr-one-step-later", "lr_one_step_later", False),
        ("--calculate-per-token-loss", "calculate_per_token_loss", True),
        ("--moe-router-load-balancing-type global_aux_loss", "moe_router_load_balancing_type", "global_aux_loss"),
    ],
)
def test_flags_precede_the_switch(flags: str, setting: str, value: object) -> None:
    assert parsed(f"{ALL} {flags} --as-megatron").flat()[setting] == value


def test_the_switch_chooses_the_last_input_of_multi_token_prediction() -> None:
    assert chosen(parsed(f"{CONSTANT} --swiglu {LATER}")) == {"mtp_zero_last_input": True}
    assert parsed(f"{LATER} --as-megatron").optional("mtp_zero_last_input")
    assert not parsed(f"{LATER.replace('--num-experts 4', '')} --as-megatron").optional("mtp_zero_last_input")


def test_the_switch_drops_dropout_of_sparse_attention() -> None:
    flags = "--experimental-attention-variant dsa --multi-latent-attention"
    assert parsed(f"{flags} --as-megatron").model.attention_dropout == 0.0


@pytest.mark.parametrize(
    ("flags", "differs"), [("", True), ("--lr-warmup-iters 2", False), ("--lr-decay-style linear", False)]
)
def test_rates_without_warm_up(flags: str, differs: bool) -> None:
    config = parsed(f"--lr-decay-style inverse-square-root {flags}")
    names = [difference.name for difference in training_differences(config)]
    assert ("inverse square root without warm-up" in names) == differs


@pytest.mark.parametrize(
    ("flags", "differs"),
    [
        ("--train-iters 9", True),
        ("--train-iters 9 --lr-decay-style constant", False),
        ("--train-samples 90", False),
    ],
)
def test_rates_of_a_batch_that_grows(flags: str, differs: bool) -> None:
    config = parse_run_config(f"--mock-data --step-batch-size-schedule 0:2 1K:8 {flags}".split())
    names = [difference.name for difference in training_differences(config)]
    assert ("learning rate of a batch that grows" in names) == differs


def test_a_file_precedes_the_switch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {data_order: keyed}")
    config = parsed(f"--as-megatron --config {tmp_path / 'run.yaml'}")
    assert config.data.data_order == "keyed" and config.model.openai_gelu


def test_conversations_keep_their_order() -> None:
    config = parse_run_config(["--sft", "--train-data-path", "lines.jsonl", "--train-iters", "4", "--as-megatron"])
    assert config.data.data_order == "keyed" and config.optional("calculate_per_token_loss") is False


@pytest.mark.parametrize(
    ("flags", "loaded", "told"),
    [
        (CONSTANT, False, "GELU"),
        (CONSTANT, True, ""),
        (f"{CONSTANT} --openai-gelu", False, ""),
        (f"{CONSTANT} --disable-bias-linear", False, ""),
        ("--squared-relu", False, "learning rate, data order"),
        ("--as-megatron", False, ""),
    ],
)
def test_the_start_notes_the_differences(flags: str, loaded: bool, told: str) -> None:
    run = set_up(parsed(flags), World(0, 1, 0, torch.device("cpu")))
    run.loaded = loaded
    found = [note.removeprefix(START).partition(";")[0] for note in notes(run) if note.startswith(START)]
    assert found == [told] * bool(told)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--reset-attention-mask", {"--reset-attention-mask"}),
        ("--reset-position-ids", set()),
        ("--fim-data", {"--fim-data"}),
        ("--num-experts 4 --moe-router-force-load-balancing", {"--moe-router-force-load-balancing"}),
        ("--bf16 --grad-reduce-in-bf16", {"--grad-reduce-in-bf16"}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", set()),
        ("--fp8-format hybrid --fp8-recipe tensorwise --num-experts 4", {"FP8", "FP8 of experts"}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --num-experts 4 --no-fp8-wgrad", set()),
        ("--reset-position-ids --position-embedding-type rope", {"--reset-position-ids"}),
        (
            f"--eod-mask-loss --reset-attention-mask {LATER}",
            {
                "--reset-attention-mask",
                "multi-token prediction across documents",
                "mean of the losses of multi-token prediction",
                "experts of tokens without loss",
            },
        ),
    ],
)
def test_documents_have_their_differences(flags: str, told: set[str]) -> None:
    config = parsed(f"{CONSTANT} --as-megatron {flags}")
    found = {difference.name for difference in training_differences(config)}
    assert found - {"initial weights and dropout masks"} == told


@pytest.mark.parametrize(("flags", "draws"), [("", True), ("--save runs", True), ("--save other", False)])
def test_a_training_that_resumes_from_its_own_folder_draws_weights_first(flags: str, draws: bool) -> None:
    load = "--load runs" if flags else ""
    names = [difference.name for difference in training_differences(parsed(f"{CONSTANT} {load} {flags}"))]
    assert any("initial weights" in name for name in names) == draws


def test_the_dry_run_explains_them() -> None:
    text = describe_rank(parsed(f"{CONSTANT} --vocab-size 100"), 1)
    assert "(--openai-gelu chooses it)" in text
    assert "rows that fill it up to a multiple of 128; --vocab-size 128 includes them" in text


@pytest.mark.parametrize(
    ("flags", "differs"),
    [("--qk-clip", True), ("--qk-clip --disable-bias-linear", False), ("--log-max-attention-logit", False)],
)
def test_clipped_biases_are_a_difference(flags: str, differs: bool) -> None:
    assert ("--qk-clip" in {difference.name for difference in training_differences(parsed(flags))}) is differs
