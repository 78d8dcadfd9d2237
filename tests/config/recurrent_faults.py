"""Faulty settings of recurrent layers, in the form of ``faults.FAULTS``."""

from __future__ import annotations

from typing import Any

DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": (2,)}
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
    (
        DELTA | {"cuda_graph_impl": "local"},
        1,
        ("cuda_graph_impl=local", "experimental_attention_variant=gated_delta_net"),
    ),
]
