"""Specifications of layers of experts."""

from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.layer_context import MLPSubmodules, MoESubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec


def get_moe_module_spec(
    use_te: bool | None = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    moe_use_legacy_grouped_gemm: bool | None = False,
) -> ModuleSpec:
    """Return the specification of a layer of experts; ``TransformerConfig`` has their number and sizes."""
    return ModuleSpec(MoELayer, submodules=MoESubmodules())


def get_moe_module_spec_for_backend(
    backend: BackendSpecProvider, num_experts: int | None = None, moe_grouped_gemm: bool | None = False, **others: Any
) -> ModuleSpec:
    """Return ``get_moe_module_spec()``; ``backend`` has no effect."""
    return get_moe_module_spec(num_experts=num_experts)
