"""Helium: Llama with rotary positions of adjacent channels."""

from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import ROPE

HELIUM = variant(
    LLAMA,
    model_type="helium",
    class_name="HeliumForCausalLM",
    fixed={"rotary_interleaved": True},
    defaults={"num_key_value_heads": 20, "head_dim": 128, "rope_theta": 100000.0},
    required={**LLAMA.required, "attention_bias": False},
    rules=(ROPE,),
)
