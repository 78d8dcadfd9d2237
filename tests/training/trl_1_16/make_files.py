"""Train with trl to create losses.json: python -m tests.training.trl_1_16.make_files, in the root of the repository.

It needs trl 1.16.0, transformers 5.24.0, peft 0.21.2 and torch 2.13.0.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
import trl.trainer.utils

from tests.training.trl_1_16 import inputs

COMMON = {
    "max_steps": inputs.STEPS,
    "learning_rate": inputs.LEARNING_RATE,
    "weight_decay": inputs.WEIGHT_DECAY,
    "adam_beta2": 0.99,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 2,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "pad_token": "<|pad|>",
}


class InFloat64:
    """Replaces trl's output layer, which computes in float32 and rounds the losses of a model in float64."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: None, labels: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Log-probabilities of ``labels``; the other results are metrics, which are not recorded."""
        found = (hidden @ weight.T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        none = torch.zeros_like(found)
        return found, none, none, none, none > 0


def run(kind: type, arguments: Any, folder: Path, model: Any, lines: list[dict[str, Any]], **more: Any) -> Any:
    """Train with ``kind`` and return the trainer and its losses."""

    class Exact(kind):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            parts.append(loss.item())
            return loss

    parts: list[float] = []
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = datasets.Dataset.from_list(lines)
    trainer = Exact(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **more)
    trainer.train()
    size = arguments.gradient_accumulation_steps
    # The loss of a micro-batch is already divided by the steps of accumulation.
    return trainer, [sum(parts[at : at + size]) for at in range(0, len(parts), size)]


def sft(folder: Path) -> list[float]:
    arguments = trl.SFTConfig(
        output_dir=str(folder / "out"),
        gradient_accumulation_steps=2,
        max_length=inputs.LENGTH,
        assistant_only_loss=True,
        **COMMON,
    )
    return run(trl.SFTTrainer, arguments, folder, inputs.load_model(folder), inputs.conversations())[1]


def packed(folder: Path) -> dict[str, Any]:
    """The losses, and the conversations of each pack in the order of the packs."""
    arguments = trl.SFTConfig(
        output_dir=str(folder / "out"),
        gradient_accumulation_steps=2,
        max_length=inputs.PACKED_LENGTH,
        packing=True,
        shuffle_dataset=False,
        assistant_only_loss=True,
        **COMMON | {"per_device_train_batch_size": 1},
    )
    trainer, losses = run(trl.SFTTrainer, arguments, folder, inputs.load_model(folder), inputs.conversations())
    tokenizer, numbers = transformers.AutoTokenizer.from_pretrained(folder), {}
    for number, line in enumerate(inputs.conversations()):
        ids = tokenizer.apply_chat_template(line["messages"], tokenize=True, return_dict=False)
        numbers[tuple(ids)] = number
    assert len(numbers) == len(inputs.conversations()), "conversations differ"
    packs = [[numbers[ids] for ids in documents(pack)] for pack in trainer.train_dataset]
    return {"losses": losses, "packs": packs}


def documents(pack: dict[str, Any]) -> Iterator[tuple[int, ...]]:
    """The tokens of each document of a pack."""
    ids = list(pack["input_ids"])
    for length in pack["seq_lengths"]:
        yield tuple(ids[:length])
        del ids[:length]


def dpo(folder: Path, *, adapters: bool) -> list[float]:
    arguments = trl.DPOConfig(
        output_dir=str(folder / "out"),
        gradient_accumulation_steps=1,
        max_length=inputs.LENGTH,
        beta=inputs.BETA,
        **COMMON | {"learning_rate": inputs.DPO_LEARNING_RATE},
    )
    model = inputs.load_model(folder)
    more = {} if adapters else {"ref_model": inputs.load_model(folder)}
    model = inputs.with_adapters(model) if adapters else model
    return run(trl.DPOTrainer, arguments, folder, model, inputs.preferences(), **more)[1]


if __name__ == "__main__":
    trl.trainer.utils._ChunkedLogProbFunction = InFloat64
    with tempfile.TemporaryDirectory() as name:
        inputs.save_inputs(Path(name))
        found = {
            "sft": sft(Path(name)),
            "packed": packed(Path(name)),
            "dpo": dpo(Path(name), adapters=False),
            "dpo, adapters": dpo(Path(name), adapters=True),
        }
    (Path(__file__).parent / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
