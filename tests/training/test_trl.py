"""SFT and DPO train as trl does: the losses of 20 steps in float64, in one process and in every kind of layout.

The losses of trl are stored (trl_1_16/make_files.py), so that the tests do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_core.config import RunConfig
from megatron_core.datasets.base import PackedSample
from megatron_core.features.conversations.dataset import ConversationDataset
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks, this_world
from tests.defects.plant import planted
from tests.training.trl_1_16 import inputs

THEIRS = json.loads((Path(inputs.__file__).parent / "losses.json").read_text())
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"sft": True},
    "packed": {"sft": True, "sft_packing": "first_fit", "seq_length": inputs.PACKED_LENGTH, "global_batch_size": 2},
    "dpo": {"dpo": True, "global_batch_size": 4},
    "dpo, adapters": {"dpo": True, "global_batch_size": 4, "lora_rank": inputs.RANK, "lora_alpha": inputs.ALPHA},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
}
CASES = [(kind, layout) for layout in LAYOUTS for kind in SETTINGS]
"""Adjacent cases differ in their kind, so that an evenly spread sample has several."""


class InOrder:
    """A round of ``own`` again and again in the given order of its packs."""

    def __init__(self, own: ConversationDataset, packs: Sequence[Sequence[int]], answers: int) -> None:
        """``answers``: samples for each pack, 2 for preferences."""
        own.packs = packs
        place = {tuple(own.lines_of(at)): at for at in range(len(packs))}
        self._own, self._answers = own, answers
        self._order = [place[tuple(pack)] for pack in packs]

    def __getitem__(self, index: int) -> PackedSample:
        pack, answer = divmod(index, self._answers)
        return self._own[self._order[pack % len(self._order)] * self._answers + answer]


def _config(folder: Path, kind: str, **layout: Any) -> RunConfig:
    inputs.save_inputs(folder)
    inputs.write_lines(folder / "lines.jsonl", inputs.preferences() if "dpo" in kind else inputs.conversations())
    common = {
        "load_hf": str(folder),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(folder),
        "data_path": (str(folder / "lines.jsonl"),),
        "split": "1,0,0",
        "seq_length": inputs.LENGTH,
        "micro_batch_size": 1 if kind == "packed" else 2,
        "global_batch_size": inputs.BATCH,
        "train_iters": inputs.STEPS,
        "lr": inputs.DPO_LEARNING_RATE if "dpo" in kind else inputs.LEARNING_RATE,
        "lr_decay_style": "constant",
        "weight_decay": inputs.WEIGHT_DECAY,
        "adam_beta2": 0.99,
        "fp64": True,
        "kernel_backend": "reference",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    own = {"dpo_beta": inputs.BETA} if "dpo" in kind else {}
    if "adapters" in kind:
        pytest.importorskip("peft", reason="peft is not installed (make install-test)")
        inputs.with_adapters(inputs.load_model(folder)).save_pretrained(folder / "adapter")
        own |= {"lora_load": str(folder / "adapter"), "lora_target_modules": tuple(inputs.TARGETS)}
    return RunConfig.from_flat(config_of_folder(folder).flat() | common | SETTINGS[kind] | own | layout)


def _losses(config: RunConfig, packs: Sequence[Sequence[int]]) -> list[float]:
    run = set_up(config, this_world())
    train = run.splits.train
    assert isinstance(train, ConversationDataset)
    run.train_loader = run.loader(InOrder(train, packs, 1 + config.value("dpo")))
    return [train_step(run).loss for _ in range(inputs.STEPS)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_training_equals_trl(kind: str, layout: str, tmp_path: Path) -> None:
    assert equals_trl(kind, layout, tmp_path)


def equals_trl(kind: str, layout: str, folder: Path) -> bool:
    """Train in a layout, and compare the losses on each rank."""
    theirs = THEIRS[kind]
    packs = theirs["packs"] if kind == "packed" else [[line] for line in range(80 // (1 + ("dpo" in kind)))]
    expected = theirs["losses"] if kind == "packed" else theirs
    found = run_ranks(1 if layout == "one process" else 2, _losses, _config(folder, kind, **LAYOUTS[layout]), packs)
    return all(ours == pytest.approx(expected, rel=1e-9) for ours in found)


STEP = "features.preferences.objective:Preferences.step_loss"
DEFECTS = {
    "the reference is the trained model": (
        ("dpo", "one process"),
        (STEP, "run.stages if self.frozen is None else self.frozen.stages", "run.stages"),
    ),
    "the adapters stay on in the reference": (
        ("dpo, adapters", "pp2"),
        (
            "features.preferences.objective:reference_log_probs",
            "without_adapters(list(stages.values()))",
            "without_adapters([])",
        ),
    ),
    "margins are those of a rank's tokens": (
        ("dpo", "cp2"),
        (
            "features.preferences.objective:preference_loss",
            'paired(log_probs - reference, group, "sum", "sum")',
            "log_probs - reference",
        ),
    ),
    "every context-parallel rank counts the whole loss": (
        ("dpo", "cp2"),
        ("features.preferences.objective:preference_loss", "losses.sum() / group.size()", "losses.sum()"),
    ),
    "every context-parallel rank counts all pairs": (
        ("dpo, adapters", "cp2"),
        ("features.preferences.objective:Preferences.count_terms", 'pairs / self.run.groups.size("cp")', "pairs"),
    ),
    "an answer ends at its end-of-turn token": (
        ("dpo", "dp2 zero3"),
        (
            "features.conversations.encoder:ConversationTokenizer.encoding",
            "answers = [(rendered.beginnings[0][1], len(text))]",
            "answers = rendered.marks[-1:]",
        ),
    ),
    "positions do not restart in a pack": (
        ("packed", "tp2 sp"),
        (
            "features.conversations.dataset:ConversationDataset._sample",
            "np.concatenate([np.arange(size, dtype=np.int64) for size in lengths])",
            f"np.arange(length) % {inputs.LENGTH}",
        ),
    ),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_found(name: str, tmp_path: Path) -> None:
    case, change = DEFECTS[name]
    with planted(*change):
        assert not equals_trl(*case, tmp_path)
