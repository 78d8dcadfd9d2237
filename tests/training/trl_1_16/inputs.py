"""A tiny GPT-2, its adapters, tokenizer, conversations and preferences: the inputs of trl's runs and of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

STEPS, BATCH, LENGTH, PACKED_LENGTH = 20, 4, 112, 160
LEARNING_RATE, DPO_LEARNING_RATE, WEIGHT_DECAY, BETA = 5e-3, 1e-3, 0.1, 0.5
RANK, ALPHA, TARGETS = 3, 7, ["c_attn", "c_proj", "c_fc"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["why", "how", "red", "blue", "seven", "moon", "river", "stone", "open", "close", "yes", "no"]


def save_inputs(folder: Path) -> None:
    """Write the model and the tokenizer to ``folder``; the weights do not depend on the version of torch."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({symbol: at for at, symbol in enumerate(symbols)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|im_start|>"]}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **ends)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": len(fast)}
    ids = {"bos_token_id": None, "eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **dropout)).double()
    fill(dict(model.named_parameters()))
    model.save_pretrained(folder)


def load_model(folder: Path) -> Any:
    """The model of ``folder`` in float64."""
    return transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def with_adapters(model: Any) -> Any:
    """``model`` with adapters of ``peft`` whose B is 0."""
    import peft

    settings: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "fan_in_fan_out": True}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    fill({name: p for name, p in adapted.named_parameters() if "lora_A" in name})
    return adapted


@torch.no_grad()
def fill(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Draw each parameter from a stream that numpy keeps the same in all versions."""
    for number, name in enumerate(sorted(parameters)):
        parameter = parameters[name]
        drawn = np.random.RandomState(number).normal(0.0, 0.1, tuple(parameter.shape))
        parameter.copy_(torch.from_numpy(drawn + (".ln_" in name and name.endswith("weight"))))


def conversations() -> list[dict[str, Any]]:
    """As many conversations of one or two turns as a run with one in each sample reads."""
    draw = np.random.RandomState(5)
    lines = []
    for number in range(STEPS * BATCH):
        messages = []
        for _ in range(1 + number % 2):
            messages += [_message("user", draw), _message("assistant", draw)]
        lines.append({"messages": messages})
    return lines


def preferences() -> list[dict[str, Any]]:
    """As many pairs of answers as a run reads; a sample is one answer."""
    draw = np.random.RandomState(6)
    names = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return [{key: [_message(role, draw)] for key, role in names.items()} for _ in range(STEPS * BATCH // 2)]


def _message(role: str, draw: np.random.RandomState) -> dict[str, str]:
    return {"role": role, "content": " ".join(draw.choice(WORDS, draw.randint(1, 4)))}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
