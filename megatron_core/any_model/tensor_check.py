"""Proof that a split part of a model computes what the whole part computes.

The forward of a caller's module may read numbers of heads and widths from anywhere. So each kind of split region (a
module that contains column-parallel layers and the row-parallel ones after them) is run twice, whole and split, with
random weights and the same inputs, and outputs and all gradients are compared. The inputs are random if ``forward``
takes one tensor, else those of the first forward. The copies are dropped afterwards.
"""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from megatron_core.any_model.tensor_heads import HEAD_COUNTS, KEY_COUNTS, Attributes, integers_of
from megatron_core.any_model.tensor_trial import (
    BOUNDS,
    PARTIAL,
    Arguments,
    Region,
    TrialResults,
    gather_outputs,
    gradient_faults,
    is_float,
    output_fault,
    run_trial,
    split_masks,
)
from megatron_core.errors import ConfigError
from megatron_core.parallel.groups import Group
from megatron_core.parallel.texts import gather_strings, listed

SYNTHETIC = (2, 5)
"""Batch and length of random inputs."""


def establish(region: Region, group: Group) -> None:
    """Adjust the modules of ``region`` to this rank's heads, now or in their first forward.

    Errors: ``ConfigError`` if no adjustment makes the split module compute what the whole one does.
    """
    for module in region.modules:
        region.adjust(module, region.ways[0][1])
    # A synthetic check finds most faults before training, and costs nothing in the first step.
    inputs = _random_inputs(region)
    if inputs is not None and _settle(region, group, inputs, is_real=False):
        return

    @torch._dynamo.disable
    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(hasattr(parameter, "of_other_stage") for parameter in module.parameters()):
            return  # it computes NaN here; the stage with its weights checks it
        with torch.inference_mode(mode=False):
            _settle(region, group, (args, kwargs), is_real=True)
        for hook in region.hooks:
            hook.remove()

    region.hooks += [module.register_forward_pre_hook(check, with_kwargs=True) for module in region.modules]


def _settle(region: Region, group: Group, inputs: Arguments, *, is_real: bool) -> bool:
    """Choose the first adjustment that is right; return False if random inputs do not fit the module."""
    if is_real:
        _check_same_inputs(region, inputs, group)
    with _undisturbed(region.device):
        weights = _weights(region)
        unsplit = run_trial(region, inputs, weights, None)
        reason = _agreed(unsplit if isinstance(unsplit, str) else "", group, region)
        if reason and is_real and not region.is_vouched:
            raise ConfigError(
                f"{_named(region)} cannot run alone, so its split over {group.size()} tensor-parallel ranks cannot be "
                f"checked ({reason}); give heads= to megatron_core.parallelize, or leave it whole with plan="
            )
        if reason or isinstance(unsplit, str):
            return is_real
        faults: list[str] = []
        for sentence, attributes in region.ways:
            split = run_trial(region, inputs, weights, attributes, unsplit, group)
            fault = _agreed(split if isinstance(split, str) else output_fault(unsplit, split), group, region)
            if not fault and not isinstance(split, str):
                fault = _agreed(gradient_faults(region, unsplit, split, group), group, region)
                if not fault:
                    _accept(region, attributes, split, group)
                    return True
            faults.append(f"{sentence}: {fault}")
    if not is_real and len(inputs[0]) > 1:  # random masks or states may not be inputs that the module is made for
        return False
    raise ConfigError(_refusal(region, group.size(), faults))


def _accept(region: Region, attributes: Attributes, split: TrialResults, group: Group) -> None:
    """Set the attributes of the modules, and let them take and return the heads of all ranks."""
    counted = [(path, name) for path, name in attributes if name in HEAD_COUNTS and name not in KEY_COUNTS]
    heads = max((getattr(region.twin.get_submodule(path), name) for path, name in counted), default=1)
    for module in region.modules:
        if heads > 1 and heads % group.size() == 0:
            module.register_forward_pre_hook(partial(split_masks, heads, group), with_kwargs=True)
        region.adjust(module, attributes)
        if split.gathered:
            module.register_forward_hook(partial(gather_outputs, split.gathered, group))


def _check_same_inputs(region: Region, inputs: Arguments, group: Group) -> None:
    """ConfigError if the ranks call a module with different values; a collective call."""
    tensors = [leaf.detach() for leaf in tree_flatten(inputs)[0] if is_float(leaf)]
    sums = [float(tensor.double().abs().sum()) for tensor in tensors]
    by_rank = [json.loads(text) for text in gather_strings(json.dumps(sums), group, region.device)]
    bound = max((BOUNDS.get(tensor.dtype, 0.0) for tensor in tensors), default=0.0)
    for rank, sums_there in enumerate(by_rank):
        if not np.allclose(sums_there, by_rank[0], rtol=bound, equal_nan=True):
            raise ConfigError(
                f"{_named(region)}: its inputs differ between the tensor-parallel ranks 0 and {rank}; the modules "
                "before it must compute the same on every rank, so give every rank of a group the same samples, and "
                "the modules before it a style that joins their outputs"
            )


def _refusal(region: Region, size: int, faults: list[str]) -> str:
    """Return the reason and the fix of a region that cannot be split."""
    start = (
        f"{_named(region)}, split over {size} tensor-parallel ranks, does not compute what the whole module computes"
    )
    missing_sum = next((fault for fault in faults if PARTIAL in fault), None)
    if missing_sum is not None:
        return f"{start} ({missing_sum})"
    custom = [module for module in region.twin.modules() if not type(module).__module__.startswith("torch.nn")]
    integers = dict.fromkeys(name for module in custom for name in integers_of(module))
    return (
        f"{start} ({'; '.join(faults[:2])}); give megatron_core.parallelize heads= with its number of heads, or the "
        f"names of its attributes that hold numbers of heads (its integers are {listed([*integers], 12) or 'none'}), "
        "and let forward read sizes from these attributes or from tensors; or correct its styles with plan=, or "
        "leave it whole"
    )


def _agreed(text: str, group: Group, region: Region) -> str:
    """Return the first text that is not empty of any rank; a collective call."""
    return next((reason for reason in gather_strings(text, group, region.device) if reason), "")


def _weights(region: Region) -> dict[str, Tensor]:
    """Return random weights, equal on all ranks, so that rows and columns are of size 1 and vectors near 1."""
    device = region.device
    generator = torch.Generator(device).manual_seed(0)
    dtypes = region.dtypes
    weights = {}
    for name, parameter in region.twin.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, device=device)
        values = values / max(parameter.shape[-1], 1) ** 0.5 if parameter.dim() > 1 else 1.0 + 0.2 * values
        weights[name] = values.to(dtypes[name])
    return weights


def _random_inputs(region: Region) -> Arguments | None:
    """Return random inputs for a ``forward`` that takes tensors of the width of the first split layer, or None."""
    twin = region.twin
    required = [p for p in inspect.signature(twin.forward).parameters.values() if p.default is p.empty]
    required = [p for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not required or len(required) > 3 or any(p.kind is p.KEYWORD_ONLY for p in required):
        return None
    widths = [getattr(layer, "in_features", None) for layer in twin.modules()]
    width = next((candidate for candidate in widths if isinstance(candidate, int)), None)
    if width is None:
        return None
    generator = torch.Generator().manual_seed(1)
    dtype = next((dtype_ for dtype_ in region.dtypes.values() if dtype_.is_floating_point), torch.float32)
    values = [torch.randn(*SYNTHETIC, width, generator=generator) for _ in required]
    return tuple(tensor.to(region.device, dtype).requires_grad_() for tensor in values), {}


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Return a context that keeps generators, and has gradients without the hooks of the caller's saved tensors."""
    devices = [device] if device.type == "cuda" else []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), hooks:
        yield


def _named(region: Region) -> str:
    return f"{region.names[0] or 'the model'} ({type(region.twin).__name__})"
