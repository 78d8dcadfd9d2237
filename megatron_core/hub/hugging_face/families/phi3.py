"""Phi-3: Llama with fused matrices, and rotary positions in a part of each head's channels, also with LongRoPE."""

from dataclasses import replace

from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import (
    PARTIAL_ROPE,
    WINDOW_OF_ALL_LAYERS,
    Settings,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.hub.hugging_face.tensors import stacked_qkv


def _positions(hf_config: Settings) -> Settings:
    """Early files say su or yarn, which mean longrope."""
    rope = rope_parameters(hf_config)
    scaling = rope_type(rope)
    if scaling not in ("default", "longrope", "su", "yarn"):
        refuse("rope_type", scaling, "for phi3 supported are default and longrope")
    return PARTIAL_ROPE.read(hf_config if scaling == "default" else {**hf_config, "rope_scaling": rope | LONGROPE})


LONGROPE = {"rope_type": "longrope"}
PHI3 = variant(
    LLAMA,
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    keys={"head_dim": None, "resid_pdrop": "hidden_dropout"},
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    required={"hidden_act": "silu"},
    rules=(replace(PARTIAL_ROPE, read=_positions), WINDOW_OF_ALL_LAYERS),
    layer_tensors={
        "self_attention.linear_qkv": stacked_qkv("self_attn.qkv_proj"),
        "mlp.linear_fc1": "mlp.gate_up_proj",
    },
)
