"""Seed-OSS: Llama with biases of queries, keys and values."""

from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import ROPE

SEED_OSS = variant(
    LLAMA,
    model_type="seed_oss",
    class_name="SeedOssForCausalLM",
    keys={"attention_bias": "add_qkv_bias", "residual_dropout": "hidden_dropout"},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    required={"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
    rules=(ROPE,),
)
