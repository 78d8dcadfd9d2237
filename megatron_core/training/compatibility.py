"""Whether a checkpoint is of the model that the flags describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError

# Settings that decide which tensors there are; shapes that differ are found tensor by tensor.
TENSORS = (
    "num_layers",
    "hidden_size",
    "untie_embeddings_and_output_weights",
    "qk_layernorm",
    "normalization",
    "disable_bias_linear",
    "add_qkv_bias",
)
# Settings that decide what is computed with them: another value would load without a complaint and give nonsense.
MEANING = (
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "norm_epsilon",
    "swiglu",
    "geglu",
    "squared_relu",
    "openai_gelu",
)


def check_same_model(stored: Mapping[str, Any], config: RunConfig, *, finetune: bool) -> None:
    """Raise ``CheckpointError`` with every setting that differs; fine-tuning may change what is not a tensor."""
    current = config.flat()
    names = TENSORS if finetune else TENSORS + MEANING
    faults = [
        f"  - {name}={current[name]!r}, but the checkpoint was trained with {name}={stored[name]!r}"
        for name in names
        if name in stored and stored[name] != current[name]
    ]
    if faults:
        way_out = "" if finetune else ", or start from its weights alone with --finetune where that is meant"
        raise CheckpointError(
            "this checkpoint is of another model:\n" + "\n".join(faults) + f"\ngive the same settings{way_out}"
        )
