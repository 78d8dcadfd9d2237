"""Megatron Core's MoE layer for ``bench_moe --megatron`` on a CPU, with CUDA's functions replaced by no-ops.

Its experts are those of its local specification, sequential products (``SequentialMLP``), because the grouped product
needs Transformer Engine and a GPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import typing
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn

from megatron_core.errors import ConfigError
from megatron_core.transformer.moe import MoELayer


class _Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Triton kernels that are imported but not run."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_triton = name.split(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_triton else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(ModuleType):
    __version__ = "3.5.0"
    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def _use_cpu() -> None:
    """Replace streams by no-ops and the device by the CPU."""
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: event, wait_stream=lambda other: None)
    torch.cuda.Stream = lambda *args, **kwargs: stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *args: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


def megatron_layer(checkout: Path, ours: MoELayer, dtype: torch.dtype) -> tuple[nn.Module, str]:
    """Megatron Core's layer with the weights of ``ours``, and its version; ``checkout`` is a folder of Megatron-LM."""
    if not (checkout / "megatron" / "core").is_dir():
        raise ConfigError(f"--megatron {checkout} has no folder megatron/core; give a checkout of NVIDIA/Megatron-LM")
    import_module("torch._inductor.compile_fx")  # needs the real triton
    sys.path.insert(0, str(checkout))
    sys.meta_path.insert(0, _Triton())
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    import megatron.core
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    _use_cpu()
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
    return layer, f"Megatron Core {megatron.core.__version__}"
