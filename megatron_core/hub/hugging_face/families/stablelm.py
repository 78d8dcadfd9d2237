"""StableLM: Llama with LayerNorm, and rotary positions in a part of each head's channels; attention and MLP may be in
parallel with one norm. StableLM 2 12B has norms of queries and keys with separate weights for each head."""

from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, KeyRule, norms_of_each_head
from megatron_core.hub.hugging_face.tensors import of_each_head
from megatron_core.schema import SWITCH

PARALLEL = KeyRule(
    read=lambda hf_config: dict.fromkeys(
        ("parallel_residual", "parallel_residual_shared_norm"), hf_config.get("use_parallel_residual", False)
    ),
    write=lambda config: {"use_parallel_residual": config.parallel_residual_shared_norm},
    types={"use_parallel_residual": SWITCH},
)
STABLELM = variant(
    LLAMA,
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    keys={
        "head_dim": None,
        "rms_norm_eps": None,
        "layer_norm_eps": "norm_epsilon",
        "use_qkv_bias": "add_qkv_bias",
        "hidden_dropout": "hidden_dropout",
    },
    fixed={"normalization": "LayerNorm"},
    defaults={"use_qkv_bias": False, "partial_rotary_factor": 0.25},
    required={"hidden_act": "silu"},
    rules=(PARTIAL_ROPE, PARALLEL, norms_of_each_head("qk_layernorm")),
    layer_tensors={
        "self_attention.q_layernorm": of_each_head("self_attn.q_layernorm.norms.{h}"),
        "self_attention.k_layernorm": of_each_head("self_attn.k_layernorm.norms.{h}"),
    },
)
