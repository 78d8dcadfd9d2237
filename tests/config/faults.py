"""Faulty settings, the world size, and words that the error message must contain.

The first word is the setting with its value, the others are the remedy. The settings change a valid configuration
of 12 heads of 10 channels, 2 layers, 64 tokens and 100 steps on mock data.
"""

from __future__ import annotations

import math
from typing import Any

from tests.config.heterogeneous_faults import HETEROGENEOUS_FAULTS
from tests.config.moe_faults import MOE, MOE_FAULTS
from tests.config.outer_faults import OUTER_FAULTS
from tests.config.recurrent_faults import RECURRENT_FAULTS
from tests.config.sparse_faults import SPARSE_FAULTS
from tests.config.stage_faults import STAGE_FAULTS

EQUAL = {"layout_invariant": True}
FULL = {"recompute_granularity": "full"}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
FIM = {"tokenizer_type": "NullTokenizer", "fim_data": True}
LONGROPE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "use_rope_scaling": True,
    "rope_scaling_type": "longrope",
    "original_max_position_embeddings": 64,
    "longrope_short_factor": (1.0,) * 5,
    "longrope_long_factor": (2.0,) * 5,
}
FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    # a single setting
    ({}, 0, ("world_size=0", "an integer >= 1")),
    ({"num_layers": 0}, 1, ("num_layers=0", "an integer from 1 to 65,536")),
    ({"micro_batch_size": -1}, 1, ("micro_batch_size=-1", "an integer from 1 to 2,147,483,647")),
    ({"eval_interval": 0}, 1, ("eval_interval=0", "an integer >= 1")),
    ({"replica_check_interval": 0}, 1, ("replica_check_interval=0", "an integer >= 1")),
    ({"eval_iters": -1}, 1, ("eval_iters=-1", "an integer >= 0")),
    ({"lr": 0.0}, 1, ("lr=0.0", "above 0")),
    ({"adam_eps": math.nan}, 1, ("adam_eps=nan", "> 0")),
    ({"initial_loss_scale": math.inf}, 1, ("initial_loss_scale=inf", "<= 3e+38")),
    ({"clip_grad": -1.0}, 1, ("clip_grad=-1.0", ">= 0 and <= 3e+38")),
    ({"hidden_dropout": 1.0}, 1, ("hidden_dropout=1.0", ">= 0 and < 1")),
    ({"attention_dropout": -0.1}, 1, ("attention_dropout=-0.1", ">= 0")),
    ({"adam_beta1": 1.0}, 1, ("adam_beta1=1.0", ">= 0 and < 1")),
    ({"adam_beta2": -0.5}, 1, ("adam_beta2=-0.5", ">= 0")),
    ({"lr_warmup_fraction": 1.0}, 1, ("lr_warmup_fraction=1.0", ">= 0 and < 1")),
    ({"rotary_percent": 1.5}, 1, ("rotary_percent=1.5", "> 0 and <= 1")),
    ({"num_layers": 10**12}, 1, ("num_layers=1000000000000", "from 1 to 65,536")),
    ({"vocab_size": 10**12}, 1, ("vocab_size=1000000000000", "from 1 to 2,147,483,647")),
    ({"distributed_timeout_minutes": 1e300}, 1, ("distributed_timeout_minutes=1e+300", "<= 1,000,000")),
    ({"fp8_format": "e4m3", "bf16": True, "fp8_margin": 10**9}, 1, ("fp8_margin=1000000000", "from 0 to 126")),
    (
        {"fp8_format": "e4m3", "bf16": True, "fp8_amax_history_len": 10**9},
        1,
        ("fp8_amax_history_len", "from 1 to 65,536"),
    ),
    ({"lr": 1e308}, 1, ("lr=1e+308", "<= 3e+38")),
    ({"norm_epsilon": 1e39}, 1, ("norm_epsilon=1e+39", "<= 3e+38")),
    ({"attn_logit_softcapping": 0.0}, 1, ("attn_logit_softcapping=0.0", "> 0")),
    ({"global_batch_size": 10**12}, 1, ("global_batch_size=1000000000000", "micro-batches in a step", "65536")),
    ({"step_batch_size_schedule": ("0:1T",)}, 1, ("step_batch_size_schedule=0:1T", "65536 micro-batches")),
    ({"hierarchical_context_parallel_sizes": (0, 0)}, 1, ("hierarchical_context_parallel_sizes=(0, 0)", "give both")),
    ({"clip_grad_value": 1e300}, 1, ("clip_grad_value=1e+300", "<= 3e+38")),
    ({"save": "a\0b"}, 1, ("save='a\\x00b'", "remove it")),
    ({"tokenizer_model": "\ud800"}, 1, ("tokenizer_model='\\ud800'", "remove it")),
    # equal bits in every layout
    ({"layout_invariant_parts": 4}, 1, ("layout_invariant_parts=4", "--layout-invariant")),
    (EQUAL | {"fp16": True}, 1, ("fp16=True", "--bf16")),
    (EQUAL | {"fp8_format": "e4m3", "bf16": True}, 1, ("fp8_format=e4m3", "remove --fp8-format")),
    (EQUAL | {"grad_compression": "bf16"}, 2, ("grad_compression=bf16", "remove --grad-compression")),
    (EQUAL | {"tp_comm_overlap_chunks": 2}, 1, ("tp_comm_overlap_chunks=2", "use 1")),
    (
        {"tensor_model_parallel_size": 2, "tp_comm_overlap_chunks": 2, "fp8_format": "e4m3", "bf16": True},
        2,
        ("tp_comm_overlap_chunks=2", "cannot be used with --fp8-format"),
    ),
    (EQUAL | {"softmax_type": "learnable"}, 1, ("softmax_type=learnable", "remove --softmax-type")),
    (EQUAL | {"num_experts": 4}, 1, ("disable_bias_linear=False", "experts", "--disable-bias-linear")),
    (EQUAL | {"optimizer": "lamb"}, 1, ("optimizer=lamb", "use adam")),
    ({"optimizer": "soap", "optimizer_cpu_offload": True}, 1, ("optimizer=soap", "remove --optimizer-cpu-offload")),
    (EQUAL | {"layout_invariant_parts": 5}, 1, ("num_attention_heads=12", "layout_invariant_parts=5", "a multiple")),
    (EQUAL | {"tensor_model_parallel_size": 3}, 3, ("tensor_model_parallel_size=3", "legal: 1, 2, 4", "multiple of 3")),
    (EQUAL | {"context_parallel_size": 8}, 8, ("layout_invariant_chunks=8", "--layout-invariant-chunks 16")),
    (EQUAL | {"seq_length": 60}, 1, ("seq_length=60", "layout_invariant_chunks=8", "a multiple")),
    (
        EQUAL | {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
        1,
        ("cross_entropy_fusion_impl=linear", "use native"),
    ),
    # the model
    ({"hidden_size": 100}, 1, ("hidden_size=100", "num_attention_heads=12", "1, 2, 4, 5, 10", "kv_channels")),
    (
        {"position_embedding_type": "rope", "kv_channels": 5},
        1,
        ("rotary_percent=1.0", "5 rotating channels", "even", "kv_channels"),
    ),
    (
        {"position_embedding_type": "rope", "rotary_percent": 0.1},
        1,
        ("rotary_percent=0.1", "1 rotating channels", "change"),
    ),
    ({"num_query_groups": 4}, 1, ("num_query_groups=4", "--group-query-attention")),
    ({"fp32_residual_connection": True}, 1, ("fp32_residual_connection=True", "add --bf16 or --fp16")),
    ({"fp32_residual_connection": True, "fp64": True}, 1, ("fp32_residual_connection=True", "add --bf16 or --fp16")),
    (
        {"group_query_attention": True, "num_query_groups": 5},
        1,
        ("num_attention_heads=12", "num_query_groups=5", "legal: 1, 2, 3, 4, 6, 12"),
    ),
    ({"swiglu": True, "squared_relu": True}, 1, ("swiglu=True and squared_relu=True", "keep one")),
    ({"position_embedding_type": "alibi", "attn_logit_softcapping": 5.0}, 1, ("position_embedding_type=alibi", "rope")),
    (
        {"position_embedding_type": "alibi", "reset_position_ids": True, "tokenizer_type": "NullTokenizer"},
        1,
        ("reset_position_ids=True", "add --reset-attention-mask"),
    ),
    ({"relu": True, "xielu": True}, 1, ("relu=True and xielu=True", "keep one")),
    ({"xielu": True, "num_experts": 4}, 1, ("xielu=True", "--num-experts")),
    ({"swiglu": True, "openai_gelu": True}, 1, ("swiglu=True and openai_gelu=True", "keep one")),
    ({"swiglu": True, "quick_geglu": True}, 1, ("swiglu=True and quick_geglu=True", "keep one")),
    ({"glu_linear_offset": 1.0}, 1, ("glu_linear_offset=1.0", "--quick-geglu")),
    ({"activation_func_clamp_value": 7.0}, 1, ("activation_func_clamp_value=7.0", "--quick-geglu")),
    (
        {"attention_backend": "flex", "softmax_type": "learnable", "attention_dropout": 0.0},
        1,
        ("softmax_type=learnable", "attention_backend=flex"),
    ),
    ({"cross_entropy_fusion_impl": "linear"}, 1, ("cross_entropy_fusion_impl=linear", "--cross-entropy-loss-fusion")),
    ({"max_position_embeddings": 32}, 1, ("max_position_embeddings=32", "seq_length=64", "64 or more")),
    ({"step_batch_size_schedule": ("0:8", "4")}, 1, ("step_batch_size_schedule=0:8 4", "TOKENS:SIZE")),
    ({"step_batch_size_schedule": ("0:8", "640:9")}, 2, ("step_batch_size_schedule", "multiple of", "1 x 2 = 2")),
    ({"eval_global_batch_size": 3}, 2, ("eval_global_batch_size=3", "2, 4")),
    (
        {"mtp_num_layers": 1, "embedding_layernorm": True, "position_embedding_type": "rope"},
        1,
        ("mtp_num_layers=1", "embedding_layernorm=True", "remove one of them"),
    ),
    ({"disable_weight_layernorm": True}, 1, ("disable_weight_layernorm=True", "--normalization RMSNorm")),
    ({"mtp_num_layers": 1}, 1, ("mtp_num_layers=1", "learned_absolute", "rope")),
    (
        {"recompute_granularity": "selective", "recompute_modules": ("norm",)},
        1,
        ("recompute_modules=('norm',)", "a list of core_attn, layernorm"),
    ),
    ({"recompute_modules": ("mlp",)}, 1, ("recompute_modules=mlp", "--recompute-granularity selective")),
    ({"end_weight_decay": 0.3}, 1, ("end_weight_decay=0.3", "--weight-decay-incr-style")),
    (
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1},
        1,
        ("end_weight_decay=None is missing", "weight_decay_incr_style=linear"),
    ),
    ({"mup_base_hidden_size": 8}, 1, ("mup_base_hidden_size=8", "--use-mup")),
    (
        {"use_mup": True, "multi_latent_attention": True, "position_embedding_type": "rope", "kv_lora_rank": 8},
        1,
        ("use_mup=True", "--multi-latent-attention"),
    ),
    ({"apply_wd_to_qk_layernorm": True}, 1, ("apply_wd_to_qk_layernorm=True", "--qk-layernorm")),
    (
        {"attention_output_gate": True, "group_query_attention": True, "tensor_model_parallel_size": 2},
        2,
        ("num_query_groups=1 cannot be split", "tensor_model_parallel_size=2"),
    ),
    ({"sft": True, "tokenizer_type": "NullTokenizer"}, 1, ("sft=True", "mock_data=True")),
    ({"chat_template": "x"}, 1, ("chat_template=x", "--sft")),
    (
        {"chat_template_date": "27.11.2026", "sft": True, "mock_data": False, "data_path": ("x",)}
        | {"tokenizer_type": "ByteLevelTokenizer", "vocab_size": None},
        1,
        ("chat_template_date='27.11.2026'", "YYYY-MM-DD"),
    ),
    ({"kv_lora_rank": 16}, 1, ("kv_lora_rank=16", "--multi-latent-attention")),
    (
        {"multi_latent_attention": True, "add_qkv_bias": True},
        1,
        ("add_qkv_bias=True", "cannot be used with --multi-latent-attention"),
    ),
    (
        {"multi_latent_attention": True, "qk_pos_emb_head_dim": 7},
        1,
        ("the 7 channels", "7 rotating channels", "qk_pos_emb_head_dim"),
    ),
    ({"qk_l2_norm": True, "qk_clip": True}, 1, ("qk_l2_norm=True cannot be used with qk_clip=True", "undo")),
    ({"qk_l2_norm": True, "qk_layernorm": True}, 1, ("qk_l2_norm=True", "qk_layernorm=True")),
    ({"no_rope_freq": (2,)}, 1, ("no_rope_freq=(2,)", "--position-embedding-type rope")),
    ({"no_rope_freq": (0,), "position_embedding_type": "rope"}, 1, ("no_rope_freq=(0,)", "n >= 1")),
    ({"no_rope_freq": (1, 2), "position_embedding_type": "rope"}, 1, ("no_rope_freq=(1, 2)", "num_layers=2")),
    ({"qk_layernorm_over_heads": True}, 1, ("qk_layernorm_over_heads=True", "qk_layernorm=True")),
    ({"parallel_residual_shared_norm": True}, 1, ("parallel_residual_shared_norm=True", "--parallel-residual")),
    (
        {"parallel_residual": True, "parallel_residual_shared_norm": True, "norm_placement": "sandwich"},
        1,
        ("parallel_residual_shared_norm=True", "norm_placement=sandwich", "use pre"),
    ),
    (
        {
            "parallel_residual": True,
            "parallel_residual_shared_norm": True,
            "cuda_graph_impl": "local",
            "cuda_graph_modules": ("attn",),
        },
        1,
        ("cuda_graph_modules=attn and parallel_residual_shared_norm=True", "remove one of them"),
    ),
    (
        {"qk_layernorm": True, "qk_layernorm_weight_per_head": True, "layout_invariant": True},
        1,
        ("qk_layernorm_weight_per_head=True", "layout_invariant=True", "remove it"),
    ),
    ({"disable_bias_layernorm": True, "normalization": "RMSNorm"}, 1, ("disable_bias_layernorm=True", "LayerNorm")),
    ({"qk_layernorm_weight_per_head": True}, 1, ("qk_layernorm_weight_per_head=True", "--qk-layernorm")),
    (
        {
            "qk_layernorm": True,
            "qk_layernorm_weight_per_head": True,
            "qk_layernorm_over_heads": True,
            "normalization": "RMSNorm",
        },
        1,
        ("qk_layernorm_weight_per_head=True and qk_layernorm_over_heads=True", "keep one"),
    ),
    (
        {"add_output_layer_bias": True, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
        1,
        ("add_output_layer_bias=True", "use native"),
    ),
    (
        {"multi_latent_attention": True, "disable_bias_linear": True, "add_attention_output_bias": True},
        1,
        ("add_attention_output_bias=True", "cannot be used with --multi-latent-attention"),
    ),
    (
        {
            "final_logit_softcapping": 30.0,
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "linear",
        },
        1,
        ("final_logit_softcapping=30.0", "use native"),
    ),
    ({"window_size": (-2, 0)}, 1, ("window_size=(-2, 0)", "--window-size 127 0")),
    ({"window_size": (4, 1)}, 1, ("window_size=(4, 1)", "causal")),
    ({"window_attn_skip_freq": (2,)}, 1, ("window_attn_skip_freq=(2,)", "--window-size")),
    ({"window_size": (4, 0), "window_attn_skip_freq": (0,)}, 1, ("window_attn_skip_freq=(0,)", "1 or more")),
    ({"window_size": (4, 0), "window_attn_skip_freq": (1, 2)}, 1, ("window_attn_skip_freq=(1, 2)", "num_layers=2")),
    # recompute
    ({**FULL, "recompute_num_layers": 1}, 1, ("recompute_method=None", "uniform or block")),
    ({**FULL, "recompute_method": "block"}, 1, ("recompute_num_layers=None", "1 to 2")),
    ({"recompute_method": "block"}, 1, ("recompute_method=block", "--recompute-granularity full")),
    (
        {"recompute_granularity": "selective", "recompute_num_layers": 1},
        1,
        ("recompute_num_layers=1", "no effect", "--recompute-granularity full"),
    ),
    (
        {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
        1,
        ("recompute_num_layers=3", "num_layers=2", "1 to 2"),
    ),
    # the layout
    ({"tensor_model_parallel_size": 4}, 6, ("world_size=6", "4 ranks", "product divides 6")),
    (CP2 | {"seq_length": 62}, 2, ("seq_length=62", "2 x context_parallel_size=2", "nearest legal: 60, 64")),
    (
        CP2 | {"seq_length": 60, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        8,
        ("seq_length=60", "multiple of 8", "tensor_model_parallel_size=4", "nearest legal: 56, 64"),
    ),
    (CP2 | {"seq_length_warmup": (6, 2, 100)}, 2, ("seq_length_warmup=6 2 100", "start and increment", "2 x context")),
    (CP2 | {"cp_comm_type": ("p2p", "a2a", "a2a")}, 2, ("cp_comm_type=p2p a2a a2a names 3", "num_layers=2")),
    (CP2 | {"cp_comm_type": ("a2a+p2p",)}, 2, ("sizes=None", "context_parallel_size=2; legal: 1 2, 2 1")),
    (CP2 | {"hierarchical_context_parallel_sizes": (1, 2)}, 2, ("no effect with cp_comm_type=p2p", "a2a+p2p")),
    (
        {"context_parallel_size": 8, "cp_comm_type": ("a2a", "p2p")},
        8,
        ("cp_comm_type=a2a exchanges the 12 heads", "among 8 ranks", "legal: 1, 2, 3, 4, 6, 12 ranks"),
    ),
    (
        MOE | {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        6,
        (
            "world_size=6 is not a multiple of 4",
            "(expert_tensor_parallel_size=2 x expert_model_parallel_size=2)",
            "start 4 ranks or a multiple",
            "product divides the 6 ranks of a stage",
        ),
    ),
    (
        MOE | {"expert_model_parallel_size": 4} | PP2,  # no second message about the rank order
        6,
        ("world_size=6 is not a multiple of 8", "start 8 ranks or a multiple", "the 3 ranks of a stage"),
    ),
    (
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "rank_order": "tp-pp-dp"} | PP2,
        4,
        ("rank_order=tp-pp-dp", "2 ranks apart", "1 for experts", "ends with pp"),
    ),
    (
        {"hidden_size": 640, "num_attention_heads": 40, "tensor_model_parallel_size": 16},
        16,
        (
            "num_attention_heads=40 cannot be split over tensor_model_parallel_size=16; "
            "legal for this model on 16 ranks: 1, 2, 4, 8",
        ),
    ),
    (
        {"group_query_attention": True, "num_query_groups": 6, "tensor_model_parallel_size": 4},
        4,
        ("num_query_groups=6 cannot be split over tensor_model_parallel_size=4", "ranks: 1, 2"),
    ),
    (
        {"ffn_hidden_size": 50, "tensor_model_parallel_size": 4},
        4,
        ("ffn_hidden_size=50 cannot be split over tensor_model_parallel_size=4", "ranks: 1, 2"),
    ),
    (
        {"seq_length": 62, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        4,
        ("seq_length=62 cannot", "tensor_model_parallel_size=4", "ranks: 1, 2, or a seq_length of 60, 64, or no --seq"),
    ),
    (  # the common divisors of 9 heads and an MLP of 1536 are 1 and 3
        {"hidden_size": 576, "num_attention_heads": 9, "ffn_hidden_size": 1536, "tensor_model_parallel_size": 9},
        9,
        ("ffn_hidden_size=1536 cannot be split over tensor_model_parallel_size=9", "ranks: 1, 3"),
    ),
    (
        {"ffn_hidden_size": 50, "tensor_model_parallel_size": 6, "seq_length": 512, "sequence_parallel": True},
        6,
        ("ffn_hidden_size=50 and seq_length=512", "ranks: 1, 2, or a seq_length of 510, 516"),
    ),
    ({"pipeline_model_parallel_size": 4}, 4, ("num_layers=2", "4 stages", "legal: 4 or more")),
    ({"pipeline_schedule": "zb_v"}, 1, ("pipeline_schedule=zb_v", "2 chunks", "pipeline_model_parallel_size to 2")),
    (
        {"num_layers": 6, "pipeline_schedule": "dualpipe_v", "num_virtual_stages_per_pipeline_rank": 3, **PP2},
        2,
        ("pipeline_schedule=dualpipe_v", "3 chunks", "legal: 2", "interleaved"),
    ),
    (
        {"num_layers": 4, "pipeline_schedule": "zb_h1", "num_virtual_stages_per_pipeline_rank": 2, **PP2},
        2,
        ("pipeline_schedule=zb_h1", "2 chunks", "legal: 1", "interleaved, zb_v, dualpipe_v"),
    ),
    (
        {"pipeline_schedule": "interleaved", **PP2},
        2,
        ("pipeline_schedule=interleaved", "num_virtual_stages_per_pipeline_rank to 2 or more"),
    ),
    (
        {"num_layers": 5, "pipeline_schedule": "zb_v", "decoder_first_pipeline_num_layers": 2, **PP2},
        2,
        ("pipeline_schedule=zb_v", "decoder_first_pipeline_num_layers", "pipeline_model_parallel_layout"),
    ),
    (
        {"pipeline_schedule": "gpipe", "pipeline_plan": "plan.txt", **PP2},
        2,
        ("pipeline_schedule=gpipe", "pipeline_plan=plan.txt", "exclude"),
    ),
    *STAGE_FAULTS,
    *MOE_FAULTS,
    *OUTER_FAULTS,
    *RECURRENT_FAULTS,
    *HETEROGENEOUS_FAULTS,
    *SPARSE_FAULTS,
    (
        {"num_layers": 7, "num_virtual_stages_per_pipeline_rank": 4, **PP2},
        2,
        ("num_layers=7", "8 stages", "legal: 8 or more"),
    ),
    (
        {"num_layers": 12, "num_layers_per_virtual_pipeline_stage": 4, **PP2},
        2,
        ("num_layers_per_virtual_pipeline_stage=4", "12 / 2 = 6", "legal: 1, 2, 3, 6"),
    ),
    (
        {"num_layers": 7, "num_layers_per_virtual_pipeline_stage": 1, **PP2},
        2,
        ("num_layers_per_virtual_pipeline_stage=1", "7 / 2", "use num_virtual_stages_per_pipeline_rank"),
    ),
    (
        {
            "num_layers": 8,
            "num_layers_per_virtual_pipeline_stage": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            **PP2,
        },
        2,
        ("num_layers_per_virtual_pipeline_stage=2", "num_virtual_stages_per_pipeline_rank=2", "keep one"),
    ),
    (
        {"num_layers_per_virtual_pipeline_stage": 1},
        1,
        ("num_layers_per_virtual_pipeline_stage=1", "pipeline_model_parallel_size", "2 or more"),
    ),
    (
        {"num_virtual_stages_per_pipeline_rank": 2},
        1,
        ("num_virtual_stages_per_pipeline_rank=2", "pipeline_model_parallel_size", "2 or more"),
    ),
    (
        {"rank_order": "tp-cp-ep-dp"} | PP2,
        2,
        ("rank_order=tp-cp-ep-dp", "legal: any order of tp-cp-ep-dp-pp"),
    ),
    ({"rank_order": "tp-tp-dp-pp"}, 1, ("rank_order=tp-tp-dp-pp", "each axis once")),
    ({"rank_order": "tp-dp-pp-xp"}, 1, ("rank_order=tp-dp-pp-xp", "each axis once")),
    ({"rank_order": "tp-pp"}, 2, ("rank_order=tp-pp", "each axis once")),
    ({"overlap_param_gather": True}, 1, ("overlap_param_gather=True", "--zero-stage 1, 2 or 3")),
    ({"zero_stage": 4}, 1, ("zero_stage=4", "legal: 0, 1, 2, 3 or None")),
    ({"data_parallel_sharding_strategy": "all"}, 1, ("data_parallel_sharding_strategy='all'", "optim_grads_params")),
    (
        {"data_parallel_sharding_strategy": "optim", "zero_stage": 3},
        1,
        ("data_parallel_sharding_strategy=optim", "zero_stage=3"),
    ),
    ({"zero3_keep_after_forward": True, "zero_stage": 2}, 1, ("zero3_keep_after_forward=True", "--zero-stage 3")),
    (
        {
            **{"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": (2,)},
            **{"context_parallel_size": 2, "seq_length_warmup": (8, 4, 100)},
        },
        2,
        ("the START of seq_length_warmup=8 in 4 parts", "linear_conv_kernel_dim=4"),
    ),
    (
        {"zero3_param_persistence_threshold": 9, "zero_stage": 2},
        1,
        ("zero3_param_persistence_threshold=9", "--zero-stage 3"),
    ),
    ({"exp_avg_dtype": "bf16", "bf16": True}, 1, ("exp_avg_dtype=bf16", "--use-precision-aware-optimizer")),
    ({"main_params_dtype": "bf16", "use_precision_aware_optimizer": True}, 1, ("main_params_dtype=bf16", "--bf16")),
    (
        {
            "exp_avg_sq_dtype": "bf16",
            "use_precision_aware_optimizer": True,
            "bf16": True,
            "grad_compression": "onebit-adam",
            "clip_grad": 0.0,
        },
        1,
        ("grad_compression=onebit-adam", "exp_avg_sq_dtype"),
    ),
    (
        {"grad_compression": "onebit-adam", "optimizer_cpu_offload": True, "zero_stage": 1},
        2,
        ("grad_compression=onebit-adam", "--optimizer-cpu-offload"),
    ),
    (
        {"grad_compression": "zero-one-adam", "zero_stage": 2},
        2,
        ("grad_compression=zero-one-adam", "zero_stage=2", "--zero-stage 0"),
    ),
    (
        {"grad_compression": "zero-one-adam", "context_parallel_size": 2},
        4,
        ("grad_compression=zero-one-adam", "context_parallel_size=2", "--context-parallel-size 1"),
    ),
    ({"grad_compression": "onebit-lamb"}, 2, ("grad_compression=onebit-lamb", "--optimizer lamb")),
    (
        {"grad_compression": "onebit-lamb", "optimizer": "lamb", "grad_compression_warmup_iters": 0},
        2,
        ("grad_compression_warmup_iters=0", "15 to 25 %"),
    ),
    (
        {"onebit_lamb_factor_min": 5.0, "grad_compression": "onebit-lamb", "optimizer": "lamb"},
        2,
        ("onebit_lamb_factor_min=5.0", "onebit_lamb_factor_max=4.0"),
    ),
    (
        {"grad_compression": "powersgd", "num_distributed_optimizer_instances": 2, "zero_stage": 1},
        4,
        ("grad_compression=powersgd", "num_distributed_optimizer_instances=2"),
    ),
    (
        {"zero3_param_offload_dir": "weights", "zero_stage": 2, "optimizer_cpu_offload": True},
        1,
        ("zero3_param_offload_dir=weights", "--zero-stage 3"),
    ),
    (
        {"zero3_param_offload_dir": "weights", "zero_stage": 3},
        1,
        ("zero3_param_offload_dir='weights'", "--optimizer-offload-dir"),
    ),
    ({"num_distributed_optimizer_instances": 2}, 2, ("num_distributed_optimizer_instances=2", "--zero-stage 1")),
    (
        {"num_distributed_optimizer_instances": 2, "zero_stage": 1},
        3,
        ("num_distributed_optimizer_instances=2 cannot split 3", "legal: 1, 3"),
    ),
    ({"zero_stage": 0, "use_distributed_optimizer": True}, 1, ("zero_stage=0", "use_distributed_optimizer=True")),
    # batches and length
    ({"global_batch_size": 10}, 4, ("global_batch_size=10", "1 x 4 = 4", "nearest legal: 8, 12")),
    ({"global_batch_size": 3}, 4, ("global_batch_size=3", "1 x 4 = 4", "nearest legal: 4")),
    ({"train_iters": None}, 1, ("train_iters=None and train_samples=None", "give one")),
    ({"train_samples": 8}, 1, ("train_iters=100 and train_samples=8", "keep one")),
    (
        {"train_iters": None, "train_samples": 7, "global_batch_size": 8},
        1,
        ("train_samples=7", "global batch of 8", "8 or more"),
    ),
    # the learning rate
    ({"min_lr": 0.1}, 1, ("min_lr=0.1", "lr=0.001", "0 to 0.001")),
    ({"lr_warmup_init": 0.1}, 1, ("lr_warmup_init=0.1", "lr=0.001", "0 to 0.001")),
    (
        {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 5},
        1,
        ("lr_warmup_fraction=0.1", "lr_warmup_iters=5", "keep one"),
    ),
    ({"lr_warmup_iters": 100}, 1, ("lr_warmup_iters=100", "100 steps", "0 to 99")),
    ({"lr_warmup_iters": 9, "lr_decay_iters": 9}, 1, ("lr_warmup_iters=9", "9 steps", "0 to 8")),
    ({"lr_decay_style": "WSD"}, 1, ("lr_wsd_decay_iters=None", "lr_decay_style=WSD", "give")),
    ({"lr_wsd_decay_iters": 5}, 1, ("lr_wsd_decay_iters=5", "--lr-decay-style WSD")),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 60, "lr_warmup_iters": 50},
        1,
        ("lr_wsd_decay_iters=60", "50 steps after warm-up", "1 to 50"),
    ),
    (
        {"lr_decay_samples": 5, "lr_warmup_iters": 2, "train_samples": 9, "train_iters": None},
        1,
        ("lr_decay_samples=5 and lr_warmup_iters=2", "all in iters"),
    ),
    ({"use_rope_scaling": True}, 1, ("use_rope_scaling=True", "--position-embedding-type rope")),
    ({"rope_scaling_type": "yarn"}, 1, ("rope_scaling_type=yarn", "--use-rope-scaling")),
    (
        {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_type": "yarn"},
        1,
        ("rope_scaling_type=yarn", "--original-max-position-embeddings"),
    ),
    ({"longrope_short_factor": (1.0,)}, 1, ("longrope_short_factor=(1.0,)", "--rope-scaling-type longrope")),
    (LONGROPE | {"longrope_long_factor": (1.0,)}, 1, ("longrope_long_factor has 1 numbers", "each of the 5 rotary")),
    (LONGROPE | {"longrope_long_factor": (0.0,) * 5}, 1, ("longrope_long_factor has 0.0", "must be a number > 0")),
    (LONGROPE | {"original_max_position_embeddings": 1}, 1, ("original_max_position_embeddings=1", "give 2 or more")),
    (LONGROPE | {"original_max_position_embeddings": None}, 1, ("rope_scaling_type=longrope needs", "add --original-")),
    (
        {"position_embedding_type": "rope", "use_rope_scaling": True, "yarn_beta_fast": 0.5},
        1,
        ("yarn_beta_fast=0.5", "yarn_beta_slow=1.0"),
    ),
    (
        {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_type": "ntk", "kv_channels": 2},
        1,
        ("rope_scaling_type=ntk", "4 or more"),
    ),
    ({"lr_warmup_samples": 5}, 1, ("lr_warmup_samples=5", "--train-samples")),
    (
        {"lr_warmup_samples": 9, "train_samples": 9, "train_iters": None},
        1,
        ("lr_warmup_samples=9", "9 samples", "0 to 8"),
    ),
    ({"save_retain_interval": 5}, 1, ("save_retain_interval=5", "--save")),
    # precision
    ({"bf16": True, "fp16": True}, 1, ("bf16=True and fp16=True", "keep one")),
    ({"bf16": True, "fp16": True, "fp64": True}, 1, ("bf16=True and fp16=True and fp64=True", "keep one")),
    ({"loss_scale": 8.0}, 1, ("loss_scale=8.0", "--fp16")),
    ({"min_loss_scale": 8.0, "initial_loss_scale": 4.0}, 1, ("min_loss_scale=8.0", "up to 4.0")),
    # data
    ({"mock_data": False}, 1, ("data_path=()", "--data-path, --train-data-path, --mock-data")),
    ({"data_path": ("a",)}, 1, ("data_path=a and mock_data=True", "keep one")),
    (
        {"mock_data": False, "data_path": ("a",), "train_data_path": ("b",)},
        1,
        ("data_path=a and train_data_path=b", "keep one"),
    ),
    ({"valid_data_path": ("v",)}, 1, ("valid_data_path=v", "train_data_path", "--split")),
    ({"test_data_path": ("v", "w")}, 1, ("test_data_path=v w", "train_data_path", "--split")),
    ({"mock_data": False, "train_data_path": ("a",), "split": "9,1"}, 1, ("split=9,1", "remove it")),
    *(
        ({"mock_data": False, "data_path": ("a",), "split": split}, 1, (f"split={split}", "969,30,1"))
        for split in ("", "a,b", "1,2,3,4", "0,1", "-1,2", "9,,1", "nan", "inf,1")
    ),
    (
        {"mock_data": False, "data_path": ("0.3", "a", "b")},
        1,
        ("data_path=0.3 a b", "every prefix a weight", "./7"),
    ),
    (
        {"mock_data": False, "data_path": ("0.3", "a", "b", "0.7")},
        1,
        ("data_path=0.3 a b 0.7", "every prefix a weight"),
    ),
    (
        {"mock_data": False, "data_path": ("0", "a", "0", "b")},
        1,
        ("data_path=0 a 0 b", "above 0", "leave that dataset out"),
    ),
    ({"mock_data": False, "data_path": ("-1", "a", "2", "b")}, 1, ("data_path=-1 a 2 b", "above 0")),
    ({"mock_data": False, "data_path": ("a", "b", "1", "c")}, 1, ("data_path=a b 1 c", "or none")),
    ({"dataloader_type": "external"}, 1, ("dataloader_type=external", "mock_data=True", "remove one")),
    ({"dataloader_type": "cyclic"}, 1, ("dataloader_type=cyclic", "mock_data=True", "single")),
    (
        {"mock_data": False, "data_phases": "p.yaml", "dataloader_type": "cyclic"},
        1,
        ("dataloader_type=cyclic", "data_phases=p.yaml has no epochs", "use single"),
    ),
    (
        {"mock_data": False, "data_phases": "p.yaml", "data_order": "megatron"},
        1,
        ("data_phases=p.yaml", "data_order=keyed", "remove --data-order megatron"),
    ),
    ({"num_workers": -1}, 1, ("num_workers=-1", "an integer from 0 to 65,536")),
    # batches and sequences that grow
    *(
        ({"rampup_batch_size": given, "global_batch_size": 16}, 2, (f"rampup_batch_size={shown}", *words))
        for given, shown, words in [
            ((4, 0, 100), "4 0 100", ("increment", "above 0")),
            ((16, 4, 100), "16 4 100", ("global_batch_size=16", "4 4 100")),
            ((4, 8, 100), "4 8 100", ("global_batch_size=16", "8 8 100")),
            ((4, 3, 100), "4 3 100", ("increment must be a multiple", "1 x 2 = 2")),
        ]
    ),
    ({"seq_length_warmup": (8, 5, 100)}, 1, ("seq_length_warmup=8 5 100", "seq_length=64")),
    (
        {"seq_length_warmup": (8, 7, 100), "tensor_model_parallel_size": 2, "sequence_parallel": True},
        2,
        ("seq_length_warmup=8 7 100", "increment must be a multiple of tensor_model_parallel_size=2"),
    ),
    (
        {"rampup_batch_size": (4, 4, 100), "global_batch_size": 16, "pipeline_plan": "p", **PP2},
        2,
        ("rampup_batch_size=4 4 100", "pipeline_plan=p", "--pipeline-schedule"),
    ),
    *(
        (FIM | {"fim_split_sample": "f", "fim_fragment_rate": 0.5, name: 1.5}, 1, (f"{name}=1.5", ">= 0 and <= 1"))
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate")
    ),
    ({"fim_rate": math.nan}, 1, ("fim_rate=nan", ">= 0 and <= 1")),
    (FIM | {"fim_split_sample": "f"}, 1, ("fim_split_sample=f", "--fim-fragment-rate")),
    (FIM | {"fim_fragment_rate": 0.5}, 1, ("fim_fragment_rate=0.5", "--fim-split-sample")),
    *(({name: "f"}, 1, (f"{name}=f", "--fim-data")) for name in ("fim_no_prefix", "fim_eod_token")),
    # the vocabulary
    *(
        ({name: True}, 1, (f"{name}=True", "--tokenizer-type"))
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data")
    ),
    ({"vocab_size": None}, 1, ("tokenizer_type=None and vocab_size=None", "give one")),
    *(
        ({"tokenizer_type": kind}, 1, ("tokenizer_model=None", f"tokenizer_type={kind}", "--tokenizer-model"))
        for kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
    ),
    (
        {"tokenizer_type": "GPT2BPETokenizer", "merge_file": "m"},
        1,
        ("vocab_file=None", "GPT2BPETokenizer", "--vocab-file"),
    ),
    (
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"},
        1,
        ("merge_file=None", "GPT2BPETokenizer", "--merge-file"),
    ),
    (
        {"tokenizer_type": "NullTokenizer", "vocab_size": None},
        1,
        ("vocab_size=None", "NullTokenizer", "--vocab-size"),
    ),
    # checkpoints
    ({"ckpt_step": 5}, 1, ("ckpt_step=5", "--load FOLDER")),
    ({"finetune": True}, 1, ("finetune=True", "--load FOLDER")),
    ({"use_checkpoint_args": True}, 1, ("use_checkpoint_args=True", "--load FOLDER")),
    ({"skip_train": True, "eval_iters": 0}, 1, ("skip_train=True and eval_iters=0", "--eval-iters")),
    ({"changed_model_settings": ("swiglu",)}, 1, ("changed_model_settings=swiglu", "--load FOLDER")),
    ({"load": "in", "changed_model_settings": ("lr",)}, 1, ("changed_model_settings=lr", "no setting of the model")),
    (
        {"save": "s3://bucket/run", "ckpt_format": "torch_dist"},
        1,
        ("ckpt_format=torch_dist", "save=s3://bucket/run", "remove --ckpt-format"),
    ),
    ({"save": "out", "ckpt_format_interval": 10}, 1, ("ckpt_format_interval=10", "--ckpt-format torch_dist")),
]
