"""A tiny model with a value head, and the numbers of its losses: the inputs of trl's and transformers' steps and of
ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.post_training.trl_1_16 import policy_inputs
from tests.training.trl_1_16.inputs import fill

PAIRS = 3
REWARDS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "pairs, centered": {"center_rewards_coefficient": 0.03},
    "pairs, margins": {"margins": True},
}
"""Settings of trl's loss of a reward model."""
OF_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 112, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
OF_QWEN3_MOE = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.0},
    **{"intermediate_size": 24, "max_position_embeddings": 112, "norm_topk_prob": True, "tie_word_embeddings": False},
}


def save_value_model(folder: Path, *, experts: bool = False, dtype: torch.dtype = torch.float64) -> None:
    """Write a model with a head of one output; the weights do not depend on the version of torch."""
    common: dict[str, Any] = {"vocab_size": policy_inputs.VOCABULARY, "num_labels": 1, "pad_token_id": 0}
    settings: Any
    if experts:
        settings = transformers.Qwen3MoeConfig(**OF_QWEN3_MOE, **common)
    else:
        settings = transformers.GPT2Config(**OF_GPT2, attn_pdrop=0.0, **common)
    model = transformers.AutoModelForSequenceClassification.from_config(settings).to(dtype)
    fill(dict(model.named_parameters()))
    model.save_pretrained(folder)


def load_value_model(folder: Path) -> Any:
    """The model of ``folder`` in float64."""
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


DIVERGENCES: dict[str, dict[str, float]] = {
    "jsd": {"beta": 0.5},
    "forward": {"beta": 0.0},
    "reverse, temperature": {"beta": 1.0, "temperature": 0.7},
}
"""Settings of trl's loss of on-policy distillation."""


def save_teacher(folder: Path) -> None:
    """Write a wider model of the same vocabulary."""
    sizes = OF_GPT2 | {"n_embd": 24, "vocab_size": policy_inputs.VOCABULARY, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()
    fill(dict(model.named_parameters()))
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Critic:
    """The returns of an answer's tokens, and the values of the critic that has computed them."""

    returns: list[float]
    old_values: list[float]


def critics(step: int) -> list[Critic]:
    """For each answer of ``policy_inputs.sampled``; the differences are on both sides of the limits."""
    draw = np.random.RandomState(200 + step)
    result = []
    for answer in policy_inputs.sampled(step):
        size = len(answer.answer)
        old_values = draw.normal(0.0, 0.4, size)
        result.append(Critic((old_values + draw.normal(0.0, 0.5, size)).tolist(), old_values.tolist()))
    return result


def pairs(step: int) -> tuple[list[list[int]], list[float]]:
    """Chosen and rejected texts in turn, and the margin of each pair."""
    draw = np.random.RandomState(300 + step)
    texts = [draw.randint(1, policy_inputs.VOCABULARY, draw.randint(2, 14)).tolist() for _ in range(2 * PAIRS)]
    return texts, draw.uniform(0.0, 1.0, PAIRS).tolist()
