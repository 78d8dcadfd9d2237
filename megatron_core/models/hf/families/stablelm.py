"""StableLM: Llama with LayerNorm, and rotary positions in a part of each head's channels; attention and MLP may be in
parallel with one norm."""

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA
from megatron_core.models.hf.rules import PARTIAL_ROPE, SWITCH, Rule

PARALLEL = Rule(
    read=lambda hf_config: dict.fromkeys(
        ("parallel_residual", "parallel_residual_shared_norm"), hf_config.get("use_parallel_residual", False)
    ),
    write=lambda config: {"use_parallel_residual": config.parallel_residual_shared_norm},
    types={"use_parallel_residual": SWITCH},
)
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
    required={"hidden_act": "silu", "qk_layernorm": False},
    rules=(PARTIAL_ROPE, PARALLEL),
)
