"""FP8 matrix products in the linear layers of any model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_core.any_model.tensor import ParallelLinear, conv1d
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.fp8.amax_history import AmaxHistories
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.rules import block_size
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.parallel.groups import ALONE, ParallelGroups
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import gather_from_all_ranks, raising_on_all_ranks

STEP = 16
"""Extents of a product in FP8 are multiples of this (torch._scaled_mm)."""


def multiply_in_fp8(
    module: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    config: RunConfig,
    groups: ParallelGroups,
    device: torch.device,
) -> None:
    """Let the linear layers inside of ``units`` multiply in FP8, if ``fp8_format`` is set.

    Layers outside of units (embeddings, the head), layers with hooks and layers with other extents than multiples of
    16 keep the compute dtype. A ``ParallelLinear`` with the same parameters replaces each ``nn.Linear``, so find the
    units again afterwards. ``module`` may have only this rank's pipeline stages. Errors: ``ConfigError`` on all ranks
    if no layer of any rank is left, and if blocks of a layer of any rank would depend on the layout.
    """
    settings = config.section(FP8Config)
    if settings.fp8_format is None:
        return
    inside = {child for unit in units for root in unit for child in root.modules()}
    replaced: dict[nn.Module, ParallelLinear] = {}
    unchanged = 0
    with raising_on_all_ranks(device):  # pipeline stages have different layers
        for path, linear in list(_linear_layers(module)):
            if linear not in inside or not _is_suitable(linear):
                unchanged += 1
                continue
            if linear not in replaced:
                replaced[linear] = _in_fp8(path, linear, settings, config)
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, replaced[linear])
    if not any(count != "0" for count in gather_from_all_ranks(str(len(replaced)), device)):
        raise ConfigError(
            f"fp8_format={settings.fp8_format}: no linear layer inside of a unit has extents that are multiples of "
            f"{STEP}; name their modules in unit_classes, or remove fp8_format"
        )
    if groups.rank == 0:
        note = f"; {unchanged} others in {settings.compute_dtype}" if unchanged else ""
        print(f"fp8: {settings.fp8_format}, {settings.fp8_recipe}: {len(replaced)} linear layers{note}", flush=True)


def histories_of(
    module: nn.Module, config: RunConfig, groups: ParallelGroups, device: torch.device
) -> AmaxHistories | None:
    """Return the amax histories of the FP8 layers of ``module``, None without FP8."""
    settings = config.section(FP8Config)
    if settings.fp8_format is None:
        return None
    return AmaxHistories([module], settings, groups.group("tp-dp-cp"), device)


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers by name; a layer with several names comes several times."""
    kinds = (nn.Linear, ParallelLinear, *conv1d())
    for path, layer in module.named_modules(remove_duplicate=False):
        if type(layer) in kinds:
            yield path, layer


def _is_suitable(linear: Any) -> bool:
    has_hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    return not has_hooks and all(extent % STEP == 0 for extent in spec_of(linear.weight).global_shape)


def _in_fp8(path: str, linear: Any, settings: FP8Config, config: RunConfig) -> ParallelLinear:
    """Return ``linear`` as a ``ParallelLinear`` whose products are in FP8."""
    if not isinstance(linear, ParallelLinear):
        linear = ParallelLinear(linear, "colwise", ALONE, transposed=type(linear) in conv1d())
    splits_input = linear.style.startswith("rowwise")
    size = block_size(settings)
    width = linear.in_features if splits_input else linear.out_features
    if size and linear.group.size() > 1 and width % size:
        raise ConfigError(
            f"fp8_recipe={settings.fp8_recipe} has blocks of {size}, and {path} has {width} features on each tensor-"
            "parallel rank: scales would depend on the layout; use fp8_recipe=rowwise or fewer ranks"
        )
    of_input, of_output = (linear.group, ALONE) if splits_input else (ALONE, linear.group)
    linear.product = FP8Products(settings, of_input, of_output, backend=config.model.kernel_backend)
    return linear
