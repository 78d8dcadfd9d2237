"""StableLM: Llama with LayerNorm, and rotary positions in a part of each head's channels."""

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA
from megatron_core.models.hf.rules import PARTIAL_ROPE

STABLELM = register(
    LLAMA,
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    keys={
        **{key: name for key, name in LLAMA.keys.items() if key not in ("head_dim", "rms_norm_eps")},
        "layer_norm_eps": "norm_epsilon",
        "use_qkv_bias": "add_qkv_bias",
        "hidden_dropout": "hidden_dropout",
    },
    fixed={**LLAMA.fixed, "normalization": "LayerNorm"},
    defaults={"use_qkv_bias": False, "partial_rotary_factor": 0.25},
    required={"hidden_act": "silu", "qk_layernorm": False, "use_parallel_residual": False},
    rules=(PARTIAL_ROPE,),
)
