"""The search finds the result of a full enumeration, and its printed commands can be started."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from megatron_core.commands.plan_layout import main, stopped_early
from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_command_line
from megatron_core.config.validate import problems, without_data
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.presets.published import preset
from megatron_core.planner.cost import LayerTimes, Pipeline, step_cost
from megatron_core.planner.explain import flag_of, objection, parse_words, start_command, whole_training
from megatron_core.planner.hardware import Hardware, known_hardware, read_hardware
from megatron_core.planner.layer_time import LayerClock
from megatron_core.planner.layout_settings import KEPT, NEUTRAL, with_settings
from megatron_core.planner.search import Candidate, Search
from megatron_core.schedules import TRAINING
from tests.runs import TINY
from tests.sample import WHOLE_MATRIX

SMALL = {
    "num_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 32000,
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "global_batch_size": 8,
}
GIVEN = ["--model-preset", "llama3-8b", "--bf16", "--global-batch-size", "64"]


MICRO = (1, 2, 4) if WHOLE_MATRIX else (1,)
"""Sizes of micro-batches in the enumeration."""


def _config(**settings: Any) -> RunConfig:
    return RunConfig.from_flat(SMALL | settings)


def _search(config: RunConfig, devices: int, hardware: Hardware | None = None) -> Search:
    return Search(config, devices, hardware or read_hardware("h100"), config.data.vocab_size or 0)


@cache
def whole_search(devices: int) -> tuple[Search, list[Candidate]]:
    """A search that nothing stops, and its five best layouts."""
    search = _search(_config(), devices)
    return search, search.best(5)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.whole_matrix)])
def test_as_fast_as_the_best_of_all(devices: int) -> None:
    """Branch and bound against every point, on a device where the obvious layouts do not fit."""
    hardware = replace(read_hardware("a100"), memory_bytes=5e9)
    search = _search(_config(), devices, hardware)
    fastest = None
    sizes = [size for size in (1, 2, 4) if size <= devices]
    for tp, pp, cp, micro, kept, schedule, chunks, zero in product(
        sizes, sizes, sizes, MICRO, KEPT[:3], (None, *TRAINING), (None, 2), range(4)
    ):
        settings = NEUTRAL | kept | {
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp,
            "sequence_parallel": tp > 1, "micro_batch_size": micro, "pipeline_schedule": schedule,
            "num_virtual_stages_per_pipeline_rank": chunks, "zero_stage": zero, "overlap_grad_reduce": True,
            "overlap_param_gather": zero > 0,
        }  # fmt: skip
        config = with_settings(search.config, settings)
        if next(problems(without_data(config), devices), None) is not None:
            continue
        found = search.candidate(config)
        if search.fits(found.memory) and (fastest is None or found < fastest):
            fastest = found
    best = search.best(3)
    assert fastest is not None and best[0].seconds <= fastest.seconds * (1 + 1e-12)
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    assert all(search.fits(each.memory) for each in best)
    assert len({each.shape for each in best}) == 3
    for each in best:  # reuses times of layers of others
        assert step_cost(each.config, devices, hardware, 32000).seconds == pytest.approx(each.seconds, rel=1e-12)


@pytest.mark.parametrize("more", [{}, {"num_experts": 4, "disable_bias_linear": True}], ids=["dense", "experts"])
def test_every_printed_command_passes_the_rules(more: dict[str, Any]) -> None:
    arguments = [word for name, value in (SMALL | more).items() for word in flag_of(name, value)]
    base = parse_command_line(arguments)[0]
    for each in _search(base, 4).best(4):
        words = shlex.split(start_command(each.config, base, arguments, 4, 2))
        assert words[:5] == ["torchrun", "--nproc-per-node", "2", "--nnodes", "2"]
        assert words[5:7] == ["-m", "megatron_core.commands.train"]
        again = parse_command_line([*words[7:], "--dry-run", "--world-size", "4"])[0]
        assert again == each.config
        assert not list(problems(without_data(again), 4))


def test_more_devices_and_memory_are_never_slower() -> None:
    times = [whole_search(devices)[1][0].seconds for devices in (1, 2, 4)]
    assert times == sorted(times, reverse=True)
    tight = replace(read_hardware("h100"), memory_bytes=5e9)
    assert _search(_config(), 4, tight).best(1)[0].seconds >= times[2]


def test_no_layout_fits() -> None:
    base = RunConfig.from_flat(preset("llama3-405b") | {"bf16": True, "global_batch_size": 8})
    with pytest.raises(LayoutError, match=r"no layout fits on 8 x h100 .*nearest miss.*take about \d+ devices"):
        _search(base, 8).best()


def test_what_speaks_against_a_layout() -> None:
    search = _search(_config(), 8)
    best = search.best(1)[0]
    assert "slower: " in objection(search, "tp8 mbs1", best)
    assert "num_attention_heads=12" in objection(
        _search(_config(num_attention_heads=12, kv_channels=128), 8), "tp8", best
    )
    tight = _search(_config(global_batch_size=16), 8, replace(read_hardware("h100"), memory_bytes=3e9))
    assert "does not fit" in objection(tight, "dp8 mbs2", None)
    with pytest.raises(LayoutError, match="8 ranks, but gpus=16"):
        parse_words(_config(), "tp8 dp1", 16)


def test_hardware_files() -> None:
    for name in known_hardware():
        found = read_hardware(name)
        assert found.name == name and found.flops("bfloat16") > 1e14 and found.source
    with pytest.raises(ConfigError, match="'tpu' is not known; legal: a100, b200, h100, h100-500w, h200"):
        read_hardware("tpu")
    with pytest.raises(ConfigError, match="memory_bytes=0 must be above 0"):
        replace(read_hardware("h100"), memory_bytes=0)
    with pytest.raises(ConfigError, match="no rate of products in int4"):
        read_hardware("h100").flops("int4")


def test_tool(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    png = tmp_path / "memory.png"
    flags = [*GIVEN, "--gpus", "8", "--hardware", "h100", "--top", "2", "--why-not", "tp8", "--explain-memory"]
    assert main([*flags, "--png", str(png)]) == 0
    text = capsys.readouterr().out
    assert "evaluated in detail" in text
    assert "torchrun --nproc-per-node 8 -m megatron_core.commands.train --model-preset" in text
    assert "w weights" in text and png.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "8", "--hardware", "abacus"], "hardware='abacus' is not known"),
        (["--gpus", "0"], "gpus=0 is out of range"),
        (["--gpus", "8", "--top", "0"], "top=0 is out of range"),
        (["--gpus", "8", "--png", "x.png"], "has no effect without explain_memory"),
        (["--gpus", "8", "--why-not", "tp3"], "gpus=8"),
        (["--gpus", "8", "--global-batch-size", "None"], "give --global-batch-size"),
    ],
)
def test_bad_input_is_one_sentence(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GIVEN, *flags]) == 1
    error = capsys.readouterr().err.strip()
    assert message in error and error.count("\n") == 0


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_runs_on_conversations_are_planned_without_data(kind: str) -> None:
    """There are no generated conversations to put in their place."""
    settings = TINY | {kind: True, "mock_data": False, "lora_rank": 2}
    assert list(problems(without_data(RunConfig.from_flat(settings)), 2)) == []


def test_preferences() -> None:
    """Pairs stay together, the reference needs memory, and its forward needs time."""
    data = {"dpo": True, "data_path": ("pairs.jsonl",), "tokenizer_type": "ByteLevelTokenizer", "vocab_size": None}
    given = data | {"pretrained_checkpoint": "sft", "zero_stage": 3, "micro_batch_size": 2, "global_batch_size": 16}
    own, hardware = _config(**given, chat_template="chat.jinja"), read_hardware("h100")
    (found,) = _search(own, 2).best(1)
    assert found.config.training.micro_batch_size % 2 == 0
    assert {each.training.micro_batch_size for each in parse_words(own, "dp2 tp4", 8)} == {2, 4, 8}
    plain = with_settings(own, {"dpo": False, "sft": True, "pretrained_checkpoint": None})
    pairs, alone = (_search(each, 8).candidate(each) for each in (own, plain))
    copy = sum(pairs.memory.values()) - sum(alone.memory.values())
    assert copy > 0 and pairs.seconds > alone.seconds
    clock = LayerClock(plain, hardware, 8, 32000)
    once, twice = (Pipeline(each, 8, clock, LayerTimes(clock)).passes[0] for each in (plain, own))
    assert twice.sums == pytest.approx((2 * once.sums[0], *once.sums[1:]), rel=1e-12)


def test_price_without_the_length_of_the_training() -> None:
    """A million tokens cost as much as in a training of any length."""
    config = _config()
    short = _search(config, 8).candidate(config)
    long = replace(short, config=with_settings(short.config, {"train_iters": 100}))
    assert whole_training(short, 8, None) == ""
    known, unknown = (whole_training(each, 8, 2.5) for each in (long, short))
    assert unknown.startswith("price ") and known.endswith(unknown.removeprefix("price"))


def test_messages_between_experts_that_another_micro_batch_hides() -> None:
    """Only the messages of the first forwards and of the last backwards remain, and they make up the difference."""
    experts = {"num_experts": 8, "expert_model_parallel_size": 8, "disable_bias_linear": True, "global_batch_size": 128}
    alone, paired = (
        step_cost(_config(**experts, overlap_moe_expert_parallel_comm=on), 8, read_hardware("h100"), 32000)
        for on in (False, True)
    )
    assert paired.by_kind["ep"] == pytest.approx(alone.by_kind["ep"] / 16, rel=0.2)
    hidden = alone.by_kind["ep"] - paired.by_kind["ep"]
    assert alone.seconds - paired.seconds == pytest.approx(hidden, rel=1e-6) and hidden > 0.02 * alone.seconds


SLOW_16_BITS = {"product_flops": {"float32": 2e11, "bfloat16": 1e11}}


@pytest.mark.parametrize(
    ("flags", "changes", "line", "adds"),
    [
        ([], {}, "dtype: bfloat16, the default on NAME; the commands have --bf16", True),
        (["--bf16"], {}, "dtype: bfloat16", False),
        (["--fp16"], {}, "dtype: float16", False),
        (["--no-bf16"], {}, "dtype: float32, as given", False),
        (["--config", "FILE"], {}, "dtype: float32, as given", False),
        ([], SLOW_16_BITS, "dtype: float32, because products in 16 bits are not faster on NAME", False),
    ],
)
def test_the_dtype_is_that_of_the_hardware(
    flags: list[str], changes: dict[str, Any], line: str, adds: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("bf16: false\n")
    machine = replace(read_hardware("h100"), **changes)
    (tmp_path / "machine.json").write_text(machine.as_json())
    given = [str(tmp_path / "run.yaml") if word == "FILE" else word for word in flags]
    model = ["--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8", "--vocab-size", "32000"]
    sizes = ["--gpus", "2", "--hardware", str(tmp_path / "machine.json"), "--top", "1", "--global-batch-size", "8"]
    assert main([*sizes, *model, *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(line.replace("NAME", machine.name))
    command = next(each for each in lines if "torchrun" in each)
    assert (command.count("--bf16") - flags.count("--bf16") == 1) == adds
    assert main([*sizes, *model, *given, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(lines[0])
    (row,) = json.loads(output.out)
    assert row["complete"] is True and row["dtype"] in line


def test_a_search_ends_in_time() -> None:
    """Each look at the clock takes a second: 30 looks, and the result is the best layout so far."""
    ticks = count()
    search = _search(_config(), 4)
    search.clock = lambda: float(next(ticks))
    found = search.best(5)
    assert search.stopped and next(ticks) < 40
    assert found and all(search.fits(candidate.memory) for candidate in found)
    whole, best = whole_search(4)
    assert not whole.stopped and best[0].seconds <= found[0].seconds
    line = stopped_early(search)
    assert line.startswith("stopped early after 30 s: ") and "--time-limit N" in line
    with pytest.raises(LayoutError, match="no layout that fits was found in 2 s"):
        Search(_config(), 64, read_hardware("h100"), 32000, seconds=2.0, clock=lambda: float(next(ticks))).best()


def test_the_bound_of_a_stopped_search_holds() -> None:
    """With time for the list of points: no layout of the whole search is faster than the bound."""
    best = whole_search(4)[1][:3]
    times = iter([0.0] * 10_000)
    search = _search(_config(), 4)
    search.clock = lambda: next(times) if not search.decided else 99.0
    found = {candidate.shape for candidate in search.best(3)}
    assert search.stopped and search.bound > 0.0
    others = [candidate for candidate in best if candidate.shape not in found]
    assert others and all(candidate.seconds >= search.bound for candidate in others)
