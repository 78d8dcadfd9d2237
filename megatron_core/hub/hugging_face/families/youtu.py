"""Youtu-LLM: the latent attention of DeepSeek-V3 with dense MLPs."""

from megatron_core.hub.hugging_face.architecture import register
from megatron_core.hub.hugging_face.families.deepseek import DEEPSEEK_V3, LATENT_MATRICES, LATENT_POSITIONS
from megatron_core.hub.hugging_face.families.glm import SIGMOID_ROUTING, SIGMOID_ROUTING_KEYS
from megatron_core.hub.hugging_face.rules import ROPE

YOUTU = register(
    DEEPSEEK_V3,
    model_type="youtu",
    class_name="YoutuForCausalLM",
    keys={
        **{key: name for key, name in DEEPSEEK_V3.keys.items() if key not in SIGMOID_ROUTING_KEYS},
        "rms_norm_eps": "norm_epsilon",
    },
    fixed={
        **{name: value for name, value in DEEPSEEK_V3.fixed.items() if name not in (*SIGMOID_ROUTING, "norm_epsilon")},
        "latent_norm_epsilon": 1e-6,
    },
    defaults={"num_key_value_heads": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_interleave": True},
    rules=(ROPE, LATENT_POSITIONS),
    layer_tensors=LATENT_MATRICES,
    mtp_layer_keys=(),
)
