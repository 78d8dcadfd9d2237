"""Validation sets by name and multiple-choice questions have the values of `transformers` in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_core.config import RunConfig
from megatron_core.config.validate import check
from megatron_core.datasets import MockDataset
from megatron_core.datasets.base import WholeRound
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.questions import scores as scoring
from megatron_core.features.questions.scores import ChoiceDataset, log_likelihoods
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.monitor.console import validation_line
from megatron_core.monitor.events import ValidationEvent
from megatron_core.tokenizers.built_in import ByteLevelTokenizer
from megatron_core.training.loop import evaluate_only
from megatron_core.training.setup import set_up
from megatron_core.verify.ranks import run_ranks, this_world
from tests.defects.plant import planted
from tests.training.trl_1_16 import inputs

QUESTIONS = [
    {"query": "2 + 2 =", "choices": [" 3", " 4", " twenty two"], "gold": 1},
    {"query": "The moon is ", "choices": ["round", "a river"], "gold": 0},
    {"query": "", "choices": ["yes", "no"], "gold": 0},
    {"query": "long " * 40, "choices": ["way", "x"], "gold": 1},
]
SIZES = {"one": 5, "two": 3}
"""Lines of each validation set: no multiples of a batch."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
}


class Events:
    """A sink that keeps evaluations."""

    setting = "events"

    def __init__(self) -> None:
        self.events: list[ValidationEvent] = []

    def on_validation(self, event: ValidationEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def _config(folder: Path, **settings: Any) -> RunConfig:
    if not (folder / "config.json").exists():
        inputs.save_inputs(folder)
        lines = inputs.conversations()
        for name, size in SIZES.items():
            inputs.write_lines(folder / f"{name}.jsonl", lines[:size])
            lines = lines[size:]
        inputs.write_lines(folder / "facts.jsonl", QUESTIONS)
    common = {
        "load_hf": str(folder),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(folder),
        "valid_data_path": tuple(str(folder / f"{name}.jsonl") for name in SIZES),
        "multiple_validation_sets": True,
        "validation_set_names": tuple(SIZES),
        "full_validation": True,
        "choices_data_path": (str(folder / "facts.jsonl"),),
        "sft": True,
        "skip_train": True,
        "seq_length": inputs.LENGTH,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": 1,
        "fp64": True,
        "kernel_backend": "reference",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return RunConfig.from_flat(config_of_folder(folder).flat() | common | settings)


def _events(config: RunConfig) -> list[ValidationEvent]:
    run, sink = set_up(config, this_world()), Events()
    evaluate_only(run, [sink])
    return sink.events


def _scores(config: RunConfig) -> list[float]:
    run = set_up(config, this_world())
    return log_likelihoods(run, run.evaluations[0].datasets["facts"]).tolist()


@torch.no_grad()
def _sum_of(model: Any, ids: list[int], counted: list[bool]) -> float:
    """The log-likelihood of the ``counted`` tokens of a text."""
    scores = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
    each = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return (each * torch.tensor(counted[1:])).sum().item()


def _their_choices(folder: Path) -> list[list[float]]:
    """Log-likelihoods of the choices of each question."""
    model, tokenizer = inputs.load_model(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for question in QUESTIONS:
        own = []
        for choice in question["choices"]:
            asked = question["query"].rstrip()
            before = tokenizer(asked)["input_ids"] if asked else [tokenizer.eos_token_id]
            after = tokenizer(question["query"][len(asked) :] + choice)["input_ids"]
            ids = (before + after)[-inputs.LENGTH - 1 :]
            own.append(_sum_of(model, ids, [at >= len(ids) - len(after) for at in range(len(ids))]))
        found.append(own)
    return found


def _their_losses(folder: Path) -> dict[str, float]:
    """Mean loss of all answers of each set."""
    model, tokenizer = inputs.load_model(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    found = {}
    for name in SIZES:
        total, count = 0.0, 0
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            given = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            encoded = tokenizer.apply_chat_template(json.loads(line)["messages"], **given)
            counted = [bool(each) for each in encoded["assistant_masks"]]
            total -= _sum_of(model, encoded["input_ids"], counted)
            count += sum(counted)
        found[name] = total / count
    return found


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_equals_transformers(layout: str, tmp_path: Path) -> None:
    config = _config(tmp_path, **LAYOUTS[layout])
    losses, choices = _their_losses(tmp_path), _their_choices(tmp_path)
    gold = [own[question["gold"]] for own, question in zip(choices, QUESTIONS, strict=True)]
    lengths = [[len(choice.removeprefix(" ")) for choice in question["choices"]] for question in QUESTIONS]
    normed = [[a / b for a, b in zip(*each, strict=True)] for each in zip(choices, lengths, strict=True)]
    right, right_normed = (
        sum(own.index(max(own)) == q["gold"] for own, q in zip(scores, QUESTIONS, strict=True)) / len(QUESTIONS)
        for scores in (choices, normed)
    )
    for events in run_ranks(1 if layout == "one process" else 2, _events, config):
        assert [event.split for event in events] == ["validation one", "validation two", "questions facts"]
        assert [event.loss for event in events[:2]] == pytest.approx(list(losses.values()), rel=1e-9)
        assert events[2].loss == pytest.approx(-sum(gold) / len(gold), rel=1e-9)
        assert (events[2].accuracy, events[2].accuracy_norm) == (right, right_normed)
        assert events[2].scalars["accuracy questions facts"] == right
        assert f"acc: {right:.4f}" in validation_line(events[2])


DEFECTS = {
    "every tensor-parallel rank counts": (
        "tp2 sp",
        "features.questions.scores:log_likelihoods",
        "if run.split.owns_loss:",
        "if True:",
    ),
    "ranks do not exchange their scores": (
        "dp2 zero3",
        "features.questions.scores:log_likelihoods",
        "all_reduce_(sums, run.groups.group(WORLD))",
        "pass",
    ),
    "context-parallel ranks do not exchange their scores": (
        "cp2",
        "features.questions.scores:log_likelihoods",
        "run.groups.group(WORLD)",
        "run.groups.group('dp')",
    ),
    "white space before a choice is not part of it": (
        "one process",
        "features.questions.scores:ChoiceDataset._encoded",
        "tokenize(question))",
        "tokenize(query))",
    ),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_found(name: str, tmp_path: Path) -> None:
    layout, *change = DEFECTS[name]
    config = _config(tmp_path, **LAYOUTS[layout])
    expected = [score for own in _their_choices(tmp_path) for score in own]
    ranks = 1 if layout == "one process" else 2
    with planted(*change):
        found = run_ranks(ranks, _scores, config)
    assert any(scores != pytest.approx(expected, rel=1e-9) for scores in found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_set_names": ("one",)}, "validation_set_names=one must be different"),
        (
            {"valid_data_path": (), "skip_train": False, "data_path": ("a",)},
            "multiple_validation_sets=True needs files",
        ),
        ({"valid_data_path": ("0.5", "a", "0.5", "b")}, "has weights"),
        ({"tokenizer_type": None, "vocab_size": 300}, "has texts, and tokenizer_type=None"),
        ({"sft": False, "dpo": True}, "full_validation=True cannot be used with dpo=True"),
    ],
)
def test_contradictions(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check(_config(tmp_path, **settings), 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query": "a", "choices": ["b"], "gold": 0}', "two or more"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "from 0 to 1"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "adds no tokens"),
        ("{", "line 1"),
        ("", "has no questions"),
    ],
)
def test_a_damaged_file_is_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "facts.jsonl").write_text(line)
    with pytest.raises(DataError, match=message):
        ChoiceDataset(str(tmp_path / "facts.jsonl"), ByteLevelTokenizer(), 16)


def test_characters_are_counted_as_in_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks have the choices "no" and "always", and its ``target_delimiter`` is the space: -1 / 2 is less than
    -2.8 / 6, but -1 / 3 is more than -2.8 / 7."""
    (tmp_path / "facts.jsonl").write_text('{"query": "a", "choices": [" no", " always"], "gold": 1}')
    dataset = ChoiceDataset(str(tmp_path / "facts.jsonl"), ByteLevelTokenizer(), 16)
    monkeypatch.setattr(scoring, "log_likelihoods", lambda run, dataset: torch.tensor([-1.0, -2.8]))
    scores = scoring.evaluate_choices(None, dataset)
    assert (scores.accuracy, scores.accuracy_norm) == (0.0, 1.0)


def test_line_separators_in_texts_do_not_end_a_question(tmp_path: Path) -> None:
    line = '{"query": "a\u2028b\x85", "choices": ["c\u2029", "d"], "gold": 1}\r\n'
    (tmp_path / "facts.jsonl").write_text(2 * line, encoding="utf-8", newline="")
    assert ChoiceDataset(str(tmp_path / "facts.jsonl"), ByteLevelTokenizer(), 16).gold == [1, 1]


def test_whole_validation_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="needs one file with an end for each set, not a MockDataset"):
        WholeRound(MockDataset(61, 16, 1))
