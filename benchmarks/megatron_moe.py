"""Megatron Core's MoE layer for ``bench_moe --megatron`` on a CPU, with CUDA's functions replaced by no-ops.

Its experts are those of its local specification, sequential products (``SequentialMLP``), because the grouped product
needs Transformer Engine and a GPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.megatron_peer import import_megatron, megatron_version
from megatron_core.features.experts.layer import MoELayer


def megatron_layer(checkout: Path, ours: MoELayer, dtype: torch.dtype) -> tuple[nn.Module, str]:
    """Megatron Core's layer with the weights of ``ours``, and its version; ``checkout`` is a folder of Megatron-LM."""
    import_megatron(checkout)
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = ours.router.config
    config = TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_moe_experts=model.num_experts,
        moe_router_topk=model.moe_router_topk,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "expt_dp", "tp_dp_cp", "dp", "dp_cp"):
        setattr(groups, name, dist.group.WORLD)
    build = get_moe_module_spec(use_te=False, num_experts=model.num_experts, moe_grouped_gemm=False)
    layer = build(config, pg_collection=groups, layer_number=1)
    with torch.no_grad():
        layer.router.weight.copy_(ours.router.weight)
        for number, expert in enumerate(layer.experts.local_experts):
            expert.linear_fc1.weight.copy_(ours.experts.linear_fc1.weight[number])
            expert.linear_fc2.weight.copy_(ours.experts.linear_fc2.weight[number])
    return layer, megatron_version(checkout)
