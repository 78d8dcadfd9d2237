"""Phi-3: Llama with fused matrices, and rotary positions in a part of each head's channels."""

from dataclasses import replace

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA
from megatron_core.models.hf.rules import (
    PARTIAL_ROPE,
    WINDOW_OF_ALL_LAYERS,
    Settings,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.models.hf.tensors import stacked_qkv


def _unscaled_rope(hf_config: Settings) -> Settings:
    kind = rope_type(rope_parameters(hf_config))
    if kind != "default":
        refuse("rope_type", kind, "for phi3 only default is supported")
    return PARTIAL_ROPE.read(hf_config)


PHI3 = register(
    LLAMA,
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    keys={key: name for key, name in LLAMA.keys.items() if key != "head_dim"} | {"resid_pdrop": "hidden_dropout"},
    required={"hidden_act": "silu"},
    rules=(replace(PARTIAL_ROPE, read=_unscaled_rope), WINDOW_OF_ALL_LAYERS),
    layer_tensors={
        **LLAMA.layer_tensors,
        "self_attention.linear_qkv": stacked_qkv("self_attn.qkv_proj"),
        "mlp.linear_fc1": "mlp.gate_up_proj",
    },
)
