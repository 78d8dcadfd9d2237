"""Differences in programs of other libraries are explained by a hypothesis that reproduces the measured tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.megatron_peer import MEGATRON
from examples.first_difference import fsdp2, uneven_sums, updates
from megatron_core.errors import DataError
from megatron_core.verify import AdamRule, compare, run_ranks
from megatron_core.verify.explanations import Division, GradientPair, explain_gradients
from megatron_core.verify.update_rules import MeasuredStep, explain_updates
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

FALLS = r"falls from (\S+) to (\S+)$"


def explanations(lines: list[str]) -> list[str]:
    """The sentences of the explanations; each has confirmed itself by two orders of magnitude or more."""
    sentences = []
    for line in lines:
        numbers = re.search(FALLS, line)
        if numbers:
            assert float(numbers[2]) * 100 <= float(numbers[1]), line
            sentences.append(line.partition("; with this")[0])
    return sentences


def differences(program: Callable[..., list[str]], folder: Path, *arguments: object) -> list[str]:
    """Run a program on one rank and on two; return the differences."""
    torch.set_num_threads(1)
    assert run_ranks(1, program, str(folder), backend="gloo") == [[]]
    return run_ranks(2, program, str(folder), *arguments, backend="gloo")[0]


# --- Sums of gradients


@pytest.mark.drawn(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("bug", "sentences"),
    [
        ("", []),
        ("rank_tokens", ["each rank divides by its own number of tokens (18, 11), and the ranks are averaged"]),
        (
            "micro_batch_tokens",
            [
                "each micro-batch is divided by its own number of tokens (3, 11, 4, 3, 2, 6), and the means are summed "
                "on each rank and averaged over ranks"
            ],
        ),
        ("sample_share", ["each micro-batch is a mean over its tokens, and these means are weighted by their samples"]),
        ("generation_batch", ["all are 0.25 times the right value"]),
        (
            "divided_twice",
            ["they are divided by 3, the number of micro-batches of a rank: the loss is divided by it a second time"],
        ),
        (
            "unsummed",
            [
                "rank 0 has the gradients of its own micro-batches only: they are not summed over ranks",
                "rank 1 has the gradients of its own micro-batches only: they are not summed over ranks",
            ],
        ),
    ],
)
def test_sums_of_trainers(bug: str, sentences: list[str], tmp_path: Path) -> None:
    lines = differences(uneven_sums.step, tmp_path, bug)
    assert explanations(lines) == [f"all gradients: {sentence}" for sentence in sentences]
    assert bool(lines) == bool(bug)


@pytest.mark.parametrize(
    ("bug", "first"), [("", ""), ("chunked_loss", "gradient of the output of hidden, in backward")]
)
def test_a_partial_sum_is_no_combination_of_micro_batches(bug: str, first: str, tmp_path: Path) -> None:
    """The first difference names the module, and nothing is claimed about sums."""
    lines = differences(fsdp2.chunked_loss, tmp_path, bug)
    assert bool(lines) == bool(bug) and not explanations(lines)
    assert not lines or lines[0].startswith(first)


@pytest.mark.skipif(not (REFERENCE / "deepspeed").exists(), reason="needs DeepSpeed")
def test_lost_micro_batches_of_deepspeed(tmp_path: Path) -> None:
    step = "examples.first_difference.zero2:step"
    assert ask(Task(step, (str(tmp_path), ""), 1)) == []
    lines = ask(Task(step, (str(tmp_path), "manual_accumulation"), 2))
    assert explanations(lines) == ["all gradients: only the final micro-batch counts"]


RANKS = ([0, 1, 2], [3, 4, 5])


def planted(weights: list[float], **given: Any) -> list[str]:
    """Explain gradients that are the weighted sum of the micro-batches' gradients."""
    draw = np.random.default_rng(3)
    pairs = []
    for name, shape in (("matrix", (4, 5)), ("bias", (5,))):
        contributions = draw.normal(size=(len(weights), *shape))
        pairs.append(GradientPair(name, np.tensordot(weights, contributions, 1), contributions))
    division = Division([0.0] * len(weights), [0.0] * len(weights), given.get("ranks", RANKS), 0, {"dp": 2}, 2)
    return explain_gradients(given.get("change", lambda pairs: pairs)(pairs), division, 1e-9)


@pytest.mark.parametrize(
    ("weights", "sentences"),
    [
        ([1.0] * 6, []),
        (
            [2.0] * 6,
            ["they are multiplied by 2, the number of ranks of dp: summed where they should be averaged, or twice"],
        ),
        (
            [0.5] * 6,
            ["they are divided by 2, the number of ranks of dp: averaged where they should not be, or twice"],
        ),
        ([6.0] * 6, ["they are multiplied by 6, the number of micro-batches: the loss is not divided by it"]),
        ([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], ["the micro-batches 1, 4 are missing"]),
        (
            [2.0**-5, 2.0**-5, 2.0**-4, 2.0**-3, 2.0**-2, 2.0**-1],
            ["each micro-batch multiplies the sum of those before it by 0.5"],
        ),
        ([1.0, 3.0, 1.0, 1.0, 1.0, 1.0], ["the micro-batches count 1, 3, 1, 1, 1, 1 times"]),
    ],
)
def test_combinations(weights: list[float], sentences: list[str]) -> None:
    assert explanations(planted(weights)) == [f"all gradients: {sentence}" for sentence in sentences]


def test_causes_that_cannot_be_told_apart_are_all_named() -> None:
    """Two ranks with two micro-batches each: half of the gradient has two possible causes."""
    sentences = explanations(planted([0.5] * 4, ranks=([0, 1], [2, 3])))
    assert len(sentences) == 2
    assert "ranks of dp" in sentences[0] and "micro-batches of a rank" in sentences[1]


def test_some_parameters_have_a_factor() -> None:
    def change(pairs: list[GradientPair]) -> list[GradientPair]:
        return [pairs[0]._replace(measured=pairs[0].measured * 2), pairs[1]._replace(measured=pairs[1].measured * 3)]

    assert explanations(planted([1.0] * 6, change=change)) == [
        "gradients of matrix: they are 2 times the right value, the number of ranks of dp=2 or its inverse",
        "gradients of bias: they are 3 times the right value",
    ]


def test_other_differences_are_not_explained() -> None:
    def change(pairs: list[GradientPair]) -> list[GradientPair]:
        return [pairs[0]._replace(measured=pairs[0].measured + np.eye(4, 5)), pairs[1]]

    assert planted([1.0] * 6, change=change) == []


def in_place(folder: str) -> list[str]:
    """A step in float64 of a model whose activation changes the output of the layer before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)).double()
    watch = compare(model, folder, dp=(dist.get_rank(), dist.get_world_size()), averaged=dist.get_world_size())
    torch.manual_seed(1)
    model(torch.randn(2, 4, dtype=torch.float64).chunk(dist.get_world_size())[dist.get_rank()])
    return watch.finish()


def test_the_record_copies_tensors(tmp_path: Path) -> None:
    assert differences(in_place, tmp_path) == []


# --- Updates


def adam(
    steps: int, change: Callable[[dict[str, Any]], None] = lambda _: None, *, missing: bool = False
) -> list[MeasuredStep]:
    """Steps of AdamW, element by element in float64; ``change`` sets a deviation."""
    settings: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-3, "root": False, "corrects": True, "clip": 0.5}
    settings |= {"decay": 0.1, "each": False, "restart": None, "shared": False, "all_steps": False, "power": 2}
    change(settings)
    draw = np.random.default_rng(5)
    weights = {"matrix": draw.normal(size=(3, 4)), "bias": draw.normal(size=4), "late": draw.normal(size=(2, 2))}
    state = {name: [np.zeros_like(weight), np.zeros_like(weight), 0] for name, weight in weights.items()}
    measured = []
    for step in range(steps):
        names = ["matrix", "bias"] if missing and step % 2 == 0 else ["matrix", "bias", "late"]
        gradients = {name: draw.normal(size=weights[name].shape) * (step + 1) * 0.1 for name in names}
        before = {name: weight.copy() for name, weight in weights.items()}
        norms = {name: float(np.sqrt((gradient**2).sum())) for name, gradient in gradients.items()}
        whole = float(np.sqrt(sum(norm**2 for norm in norms.values())))
        if step == settings["restart"]:
            state = {name: [np.zeros_like(weight), np.zeros_like(weight), 0] for name, weight in weights.items()}
        state[names[-1]][2] += 1
        for name in names:
            norm = norms[name] if settings["each"] else whole
            gradient = gradients[name] * (min(1.0, settings["clip"] / (norm + 1e-6)) if settings["clip"] else 1.0)
            slots = state[name]
            slots[2] += name != names[-1] and not settings["shared"]
            count = step + 1 if settings["all_steps"] else state[names[-1]][2] if settings["shared"] else slots[2]
            slots[0] = settings["betas"][0] * slots[0] + (1 - settings["betas"][0]) * gradient
            slots[1] = (
                settings["betas"][1] * slots[1] + (1 - settings["betas"][1]) * np.abs(gradient) ** settings["power"]
            )
            mean, square = slots[0], slots[1]
            if settings["corrects"]:
                mean, square = mean / (1 - settings["betas"][0] ** count), square / (1 - settings["betas"][1] ** count)
            root = np.sqrt(square + settings["eps"]) if settings["root"] else np.sqrt(square) + settings["eps"]
            decay = settings["decay"] if weights[name].ndim > 1 else 0.0
            weights[name] = weights[name] - 0.01 * (mean / root + decay * weights[name])
        measured.append(MeasuredStep(before, gradients, {name: weight.copy() for name, weight in weights.items()}))
    return measured


RULE = AdamRule([0.01] * 6, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1, max_norm=0.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"root": True}, "eps is added inside the square root"),
        ({"corrects": False}, "the moments are not corrected for their start at 0"),
        ({"betas": (0.99, 0.9)}, "the two betas are exchanged"),
        ({"decay": 0.0}, "no parameter has weight decay"),
        ({"clip": 0.0}, "gradients are not clipped"),
        ({"clip": 1.0}, "gradients are clipped to a norm of 1 instead of 0.5"),
        ({"each": True}, "each gradient is clipped by its own norm instead of the norm of all"),
        ({"restart": 3}, "the moments start at 0 again in step 4"),
        ({"root": True, "decay": 0.0}, "eps is added inside the square root and no parameter has weight decay"),
    ],
)
def test_deviations_of_adam(settings: dict[str, Any], sentence: str) -> None:
    steps = adam(6, lambda healthy: healthy.update(settings))
    assert explanations(explain_updates(steps, RULE)) == [f"update: {sentence}"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, None),
        (
            {"shared": True},
            "the bias correction of all parameters takes the step count of the final one with a gradient",
        ),
        ({"all_steps": True}, "the bias correction counts all steps, also those without a gradient of the parameter"),
    ],
)
def test_counts_of_steps(settings: dict[str, Any], sentence: str | None) -> None:
    """A parameter has gradients in every second step, as in DeepSpeed's pull request 8471."""
    steps = adam(6, lambda healthy: healthy.update(settings), missing=True)
    lines = explain_updates(steps, RULE)
    assert explanations(lines) == ([f"update: {sentence}"] if sentence else []) and bool(lines) == bool(sentence)


def test_the_rule_itself_and_unknown_rules() -> None:
    assert explain_updates(adam(6), RULE) == []
    (line,) = explain_updates(adam(6, lambda settings: settings.update(power=1.5)), RULE)
    assert re.fullmatch(r"the update differs from AdamW by \S+; no known deviation explains it \(at best \S+\)", line)
    (line,) = explain_updates(adam(6), replace(RULE, rates=[0.02] * 6))
    assert "0.5 times" in line
    with pytest.raises(DataError, match="rates has 2 values for 6 steps"):
        explain_updates(adam(6), replace(RULE, rates=[0.01] * 2))
    still = [step._replace(after=step.before) for step in adam(2)]
    with pytest.raises(DataError, match="no weight changed"):
        explain_updates(still, RULE)


@pytest.mark.parametrize("bug", ["", "decays_all"])
def test_decay_of_all_parameters(bug: str) -> None:
    sentence = "update: weight decay also changes 0.bias, 1.weight, 1.bias, 2.bias, which should have none"
    assert explanations(updates.decay(bug)) == ([sentence] if bug else [])


@pytest.mark.skipif(not MEGATRON.exists(), reason="needs Megatron Core: make install-test")
@pytest.mark.parametrize(
    ("bug", "ending"),
    [
        ("", None),
        (
            "late_rate",
            "are 0, 0.005, 0.01, 0.00933, 0.0075 instead of 0.005, 0.01, 0.00933, 0.0075, 0.005: one step late",
        ),
        ("short_decay", "are 0.005, 0.01, 0.008536, 0.005, 0.001464 instead of 0.005, 0.01, 0.00933, 0.0075, 0.005"),
    ],
)
def test_schedules_of_megatron_core(bug: str, ending: str | None) -> None:
    lines = run_ranks(1, updates.megatron_schedule, bug, str(MEGATRON), backend="gloo")[0]
    assert explanations(lines) == ([f"update: learning rates {ending}"] if ending else [])
    assert bool(lines) == bool(ending)


@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("program", "bug", "ending"),
    [
        (updates.accelerate_schedule, "", None),
        (updates.accelerate_schedule, "scheduler_by_rank", "the schedule advances 2 times in a step"),
        (updates.clipping, "", None),
        (updates.clipping, "shard_norm", "each rank clips its shards by their own norm instead of the norm of all"),
    ],
)
def test_accelerate_and_fsdp2(program: Callable[..., list[str]], bug: str, ending: str | None) -> None:
    for lines in run_ranks(2, program, bug, backend="gloo"):
        sentences = explanations(lines)
        assert bool(lines) == bool(ending) and len(sentences) == bool(ending)
        assert ending is None or sentences[0].endswith(ending)


@pytest.mark.skipif(not (REFERENCE / "deepspeed").exists(), reason="needs DeepSpeed")
@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        ("", None),
        ("l2", "the weight decay is part of the gradient (L2), not of the update"),
        ("default_clipping", "gradients are clipped to a norm of 1 although they should not be clipped"),
    ],
)
def test_updates_of_deepspeed(bug: str, sentence: str | None) -> None:
    lines = ask(Task("examples.first_difference.updates:zero2", (bug,), 2))
    assert explanations(lines) == ([f"update: {sentence}"] if sentence else []) and bool(lines) == bool(sentence)
