"""ERNIE 4.5: Llama with rotary positions of adjacent channels."""

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA

ERNIE = register(
    LLAMA,
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    keys={key: name for key, name in LLAMA.keys.items() if key != "attention_dropout"},
    fixed={**LLAMA.fixed, "rotary_interleaved": True},
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 500000.0},
    required={"hidden_act": "silu", "use_bias": False},
)
