"""Rows of the parity matrix with layers of different sizes, in the form of ``rows.ROWS``."""

from __future__ import annotations

from megatron_core.config.layer_settings import LayerBlock, LayerPart
from megatron_core.features.layer_sizes.settings import write_blocks

NO_OP, LINEAR = LayerPart(no_op=True), LayerPart(linear=True)
BLOCKS = (
    LayerBlock(LayerPart(size=2), LayerPart(size=48)),
    LayerBlock(NO_OP, LINEAR),
    LayerBlock(LINEAR, LayerPart(size=96)),
    LayerBlock(NO_OP, NO_OP),
    LayerBlock(LayerPart(), NO_OP),
)
LAYERS = {
    "num_layers": len(BLOCKS),
    "position_embedding_type": "rope",
    "heterogeneous_layers_config_encoded_json": write_blocks(BLOCKS),
}
NEMOTRON = LAYERS | {
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "ffn_hidden_size": 64,
    "group_query_attention": True,
    "num_query_groups": 1,
}
SDPA = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
TP2, TP4, SP = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}, {"sequence_parallel": True}
PP2, CP2 = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
ZERO3 = {"zero_stage": 3, "overlap_grad_reduce": True, "overlap_param_gather": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}

HETEROGENEOUS_ROWS: dict[str, tuple[int, dict, dict]] = {
    "layers of different sizes, tp2": (2, LAYERS, TP2),
    "layers of different sizes, tp2 sp": (2, NEMOTRON, TP2 | SP),
    "layers of different sizes, tp4 sp": (4, LAYERS, TP4 | SP),
    "layers of different sizes, pp2": (2, LAYERS, PP2),
    "layers of different sizes, full recompute, pp2 zb_v": (
        2,
        NEMOTRON,
        PP2 | RECOMPUTED | {"pipeline_schedule": "zb_v"},
    ),
    "layers of different sizes, a stage of empty layers, pp2 x 2 chunks": (
        2,
        LAYERS,
        PP2 | {"pipeline_model_parallel_layout": "Ett|t|t|tL"},
    ),
    "layers of different sizes, dp2 zero3": (2, LAYERS, ZERO3),
    "layers of different sizes, muon, dp2 tp2 zero1": (
        4,
        NEMOTRON | {"optimizer": "muon"},
        TP2 | {"use_distributed_optimizer": True},
    ),
    "layers of different sizes, lora, tp2 sp": (2, NEMOTRON | {"lora_rank": 3, "lora_dropout": 0.1}, TP2 | SP),
    "layers of different sizes, clipped heads, tp2": (
        2,
        NEMOTRON | SDPA | {"qk_layernorm": False, "qk_clip": True, "qk_clip_threshold": 0.5, "lr": 3e-2},
        TP2,
    ),
    "layers of different sizes, packed, cp2 a2a": (2, LAYERS | SDPA | PACKED, CP2 | {"cp_comm_type": ("a2a",)}),
    "layers of different sizes, dp2 tp2 cp2 sp zero3": (8, NEMOTRON | SDPA, TP2 | CP2 | SP | ZERO3),
}
