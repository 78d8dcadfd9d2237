"""Faulty settings of recurrent layers, in the form of ``faults.FAULTS``."""

from __future__ import annotations

from typing import Any

KIMI = {
    "experimental_attention_variant": "kimi_delta_attention",
    "linear_attention_freq": (2,),
    "linear_num_value_heads": 16,
}
DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": (2,)}
HYBRID = {"hybrid_layer_pattern": "M*", "mamba_num_heads": 16}
MOE = {"num_experts": 4, "moe_router_topk": 2}
RECURRENT_FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({"linear_attention_freq": (2,)}, 1, ("linear_attention_freq=(2,)", "--experimental-attention-variant")),
    (DELTA | {"linear_attention_freq": None}, 1, ("experimental_attention_variant", "needs linear_attention_freq")),
    (DELTA | {"linear_attention_freq": (1, 2)}, 1, ("linear_attention_freq=(1, 2)", "one number n >= 1")),
    (DELTA | {"linear_attention_freq": (0,)}, 1, ("linear_attention_freq=(0,)", "one number n >= 1")),
    (DELTA | {"linear_attention_freq": (1,)}, 1, ("linear_attention_freq=(1,)", "has no effect")),
    (DELTA | {"linear_num_value_heads": 24}, 1, ("linear_num_value_heads=24", "linear_num_key_heads=16")),
    (DELTA | {"tensor_model_parallel_size": 3}, 3, ("linear_num_key_heads=16", "tensor_model_parallel_size=3")),
    (
        DELTA | {"context_parallel_size": 2, "seq_length": 16, "linear_conv_kernel_dim": 9},
        2,
        ("seq_length=16", "linear_conv_kernel_dim=9", "longer sequences"),
    ),
    (
        DELTA | {"experimental_attention_variant": "kimi_delta_attention"},
        1,
        ("linear_num_value_heads=32", "linear_num_key_heads=16", "kimi_delta_attention"),
    ),
    (
        DELTA | {"lora_rank": 4, "lora_target_modules": ("in_proj_qkvz", "in_proj_z")},
        1,
        ("lora_target_modules=", "overlap", "in_proj_ba"),
    ),
    (
        KIMI | {"lora_rank": 4, "lora_target_modules": ("in_proj_qkv", "in_proj_z")},
        1,
        ("lora_target_modules=in_proj_qkv in_proj_z names no layer",),
    ),
    ({"lora_rank": 4, "lora_target_modules": ("q_a_proj",)}, 1, ("=q_a_proj names no layer",)),
    ({"lora_rank": 4, "lora_target_modules": ("*.layers.9.*.linear_qkv",)}, 1, ("linear_qkv names no layer",)),
    (
        {"lora_rank": 4, "lora_target_modules": ("linear_qkv", "q_a_proj", "model.layers.0.mlp.down_proj")},
        1,
        ("lora_target_modules=model.layers.0.mlp.down_proj: no layer", "decoder.layers.0.mlp.linear_fc2"),
    ),
    (DELTA | {"use_mup": True}, 1, ("use_mup=True", "remove --use-mup")),
    (DELTA | {"compile": True}, 1, ("compile=True", "remove --compile")),
    (DELTA | {"layout_invariant": True}, 1, ("experimental_attention_variant", "layout_invariant=True")),
    (DELTA | {"fp8_format": "hybrid", "bf16": True}, 1, ("fp8_format=hybrid", "remove --fp8-format")),
    (DELTA | {"save": "out", "ckpt_format": "torch_dist"}, 1, ("ckpt_format=torch_dist", "use torch_dcp")),
    (
        DELTA | {"linear_attention_freq": (3,), "num_layers": 2, "qk_clip": True},
        1,
        ("qk_clip=True has no effect", "linear_attention_freq=(3,)", "remove --qk-clip"),
    ),
    (
        DELTA | {"linear_attention_freq": (1, 1), "num_layers": 2, "qk_clip": True},
        1,
        ("qk_clip=True has no effect", "linear_attention_freq=(1, 1)"),
    ),
    ({"hybrid_layer_pattern": "**-"}, 1, ("num_layers=2 must be 3", "remove num_layers")),
    ({"hybrid_layer_pattern": ""}, 1, ("hybrid_layer_pattern='' is empty", "legal: M G * H C - E")),
    ({"hybrid_layer_pattern": "*X"}, 1, ("hybrid_layer_pattern=*X", "legal: M G * H C - E")),
    (
        {"hybrid_layer_pattern": "mm", "mamba_state_dim": 8},
        1,
        ("hybrid_layer_pattern=mm has the letters m;", "each layer (capitals)"),
    ),
    (
        {"hybrid_layer_pattern": "*-/*", "mtp_num_layers": 2, "position_embedding_type": "rope"},
        1,
        ("hybrid_layer_pattern=*-/* and --mtp-num-layers 2", "remove --mtp-num-layers"),
    ),
    ({"hybrid_layer_pattern": "*|-"}, 1, ("hybrid_layer_pattern=*|-", "pipeline_model_parallel_layout=Et|tL")),
    ({"hybrid_layer_pattern": "*+"}, 1, ("hybrid_layer_pattern=*+", "write * for all")),
    ({"hybrid_layer_pattern": "*-/*"}, 1, ("hybrid_layer_pattern=*-/*", "multi-token prediction")),
    ({"hybrid_layer_pattern": "*E"}, 1, ("hybrid_layer_pattern=*E", "add --num-experts")),
    (HYBRID | MOE | {"moe_layer_freq": (1,)}, 1, ("num_experts=4", "hybrid_layer_pattern=M*", "write E")),
    (MOE | {"hybrid_layer_pattern": "*E", "moe_layer_freq": (2,)}, 1, ("moe_layer_freq=(2,)", "remove it")),
    (HYBRID | {"parallel_residual": True}, 1, ("parallel_residual=True", "remove one of them")),
    (HYBRID | DELTA, 1, ("experimental_attention_variant", "write G")),
    ({"hybrid_layer_pattern": "G*", "linear_attention_freq": (2,)}, 1, ("linear_attention_freq=(2,)", "remove one")),
    (
        HYBRID | {"mtp_num_layers": 1, "position_embedding_type": "rope"},
        1,
        ("mtp_num_layers=1", "add /*- to the pattern"),
    ),
    (HYBRID | {"mamba_num_heads": 12}, 1, ("mamba_num_heads=12", "mamba_num_groups=8", "legal: 1, 2, 3, 4, 6, 12")),
    (HYBRID | {"mamba_num_heads": None}, 1, ("2 x hidden_size=240", "mamba_head_dim=64", "set mamba_num_heads")),
    (HYBRID | {"mamba_dt_min": 0.5, "mamba_dt_max": 0.1}, 1, ("mamba_dt_max=0.1", "mamba_dt_min=0.5")),
    (
        HYBRID | {"mamba_multipliers": (1.0, float("nan"), 1.0, 1.0, 1.0)},
        1,
        ("mamba_multipliers", "must be finite numbers"),
    ),
    (
        HYBRID | {"hybrid_layer_pattern": "H*", "mamba_mixer": "gated_delta_product"},
        1,
        ("mamba_mixer=gated_delta_product", "layers H have Mamba-2 mixers"),
    ),
    (HYBRID | {"mamba_mixer": "gated_delta_product", "mamba_dt_min": 0.1}, 1, ("mamba_dt_min=0.1", "mamba2")),
    (HYBRID | {"parallel_mixer_multipliers": (1.0, 2.0)}, 1, ("parallel_mixer_multipliers", "a layer H")),
    (HYBRID | {"tensor_model_parallel_size": 3}, 3, ("mamba_num_groups=8", "tensor_model_parallel_size=3")),
    ({"mamba_state_dim": 64}, 1, ("mamba_state_dim=64", "--hybrid-layer-pattern")),
    ({"hybrid_layer_pattern": "*-", "linear_conv_kernel_dim": 3}, 1, ("linear_conv_kernel_dim=3", "M, H, G or C")),
    (
        {"hybrid_layer_pattern": "C-", "hidden_size": 66, "num_attention_heads": 4, "kv_channels": 16}
        | {"ffn_hidden_size": 64, "tensor_model_parallel_size": 4},
        4,
        ("hidden_size=66", "tensor_model_parallel_size=4"),
    ),
    (
        {"hybrid_layer_pattern": "C-", "save": "out", "ckpt_format": "torch_dist"},
        1,
        ("layers C", "use torch_dcp"),
    ),
    (HYBRID | {"use_mup": True}, 1, ("use_mup=True", "remove --use-mup")),
    (HYBRID | {"layout_invariant": True}, 1, ("hybrid_layer_pattern", "layout_invariant=True")),
    (
        {"hybrid_layer_pattern": "G*", "save": "out", "ckpt_format": "torch_dist"},
        1,
        ("swiglu=False with gated delta nets", "use torch_dcp"),
    ),
    (
        HYBRID | {"hybrid_layer_pattern": "H-", "save": "out", "ckpt_format": "torch_dist"},
        1,
        ("layers H", "use torch_dcp"),
    ),
    (HYBRID | {"hybrid_layer_pattern": "M-", "qk_clip": True}, 1, ("qk_clip=True has no effect", "remove --qk-clip")),
    (
        DELTA | {"cuda_graph_impl": "local"},
        1,
        ("cuda_graph_impl=local", "cannot be used with --experimental-attention-variant"),
    ),
]
