"""Expert parallelism of any model: each rank keeps a part of the experts, and tokens travel to the ranks of theirs.

A module of experts has stacked parameters ``[E, ...]`` and the forward (tokens ``[T, h]``, chosen experts ``[T, k]``,
weights of the choices ``[T, k]``) -> ``[T, h]``, as in models of transformers from release 5 on. The module's own code
computes the experts that this rank keeps, so that activations, biases and clamps stay the model's. Routers, auxiliary
losses and shared experts do not change. Source: Lepikhin et al. 2021, arXiv 2006.16668, section 3.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.compiled import DerivedForward
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import split
from megatron_core.parallel.texts import listed
from megatron_core.transformer.moe.dispatch import AllToAll
from megatron_core.transformer.moe.router import Routing

WORD = "expert"
SHARED = "shared"
"""Part of the names of experts that compute every token."""


def split_experts(model: nn.Module, groups: ParallelGroups) -> None:
    """Keep this rank's part of each module of experts of ``model``, whose weights are equal on all ranks.

    Errors: ``ConfigError`` if there are none, or if some cannot be split; ``LayoutError`` for numbers of experts that
    are not a multiple of the ranks.
    """
    ranks = groups.size("ep")
    if ranks == 1:
        return
    modules = {name: module for name, module in model.named_modules() if _experts_of(module)}
    _check_complete(model, modules, ranks)
    for name, module in modules.items():
        _split(name, module, groups)


def _experts_of(module: nn.Module) -> int:
    """The number of experts of a module that can be split; 0 for other modules."""
    stacked = {len(parameter) if parameter.dim() > 1 else 0 for parameter in module.parameters(recurse=False)}
    inside = [parameter for child in module.children() for parameter in child.parameters()]
    if len(stacked) != 1 or inside:
        return 0
    (size,) = stacked
    arguments = sum(map(_is_positional, inspect.signature(module.forward).parameters.values()))
    return size if arguments == 3 and size in _counts(module).values() else 0


def _counts(module: nn.Module) -> dict[str, int]:
    """The attributes of a module that hold a number of experts."""
    return {name: value for name, value in vars(module).items() if WORD in name and type(value) is int}


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _check_complete(model: nn.Module, modules: dict[str, nn.Module], ranks: int) -> None:
    """Refuse experts that would stay whole on every rank."""
    if not modules:
        raise ConfigError(
            f"expert_model_parallel_size={ranks}: the model has no module of experts with stacked parameters [E, ...], "
            "a number of experts as an attribute, and the forward (tokens, chosen experts, weights); remove the setting"
        )
    inside = tuple(f"{name}." for name in modules)
    whole = [
        name
        for name, parameter in model.named_parameters()
        if any(WORD in part and SHARED not in part for part in name.split(".")[:-1])
        and not name.startswith(inside)
        and SHARED not in name
    ]
    if whole:
        raise ConfigError(
            f"expert_model_parallel_size={ranks}: {listed(whole)} would be whole on every rank, because the module has "
            "another form than (tokens, chosen experts, weights) with stacked parameters; remove the setting"
        )


def _split(name: str, module: nn.Module, groups: ParallelGroups) -> None:
    experts = _experts_of(module)
    ranks = groups.size("ep")
    if experts % ranks:
        raise LayoutError(
            f"{name}: {experts} experts cannot be divided by expert_model_parallel_size={ranks}; choose a divisor of "
            f"{experts}"
        )
    for label, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            raise ConfigError(
                f"{name}.{label} is on the meta device; with expert_model_parallel_size={ranks} construct the model "
                "with memory"
            )
        spec = split(tuple(parameter.shape), 0, groups.index("ep"), ranks, axis="ep")
        # Expert layers have their own view of the ranks: replicas of this part are the ranks of edp.
        spec = replace(spec, indices=(("etp", 0), *spec.indices), replica_axes=("edp",))
        local = parameter.new_empty(spec.local_shape)
        with torch.no_grad():
            spec.localise(parameter.detach(), local)
        parameter.data = local
        attributes: Any = parameter
        attributes.shard_spec = spec
    for label, count in _counts(module).items():
        if count == experts:
            setattr(module, label, experts // ranks)
    dispatcher = AllToAll(groups, experts)
    owner: Any = module
    owner.forward = DerivedForward(module.forward, partial(_Exchange, name=name, dispatcher=dispatcher))


@dataclass(frozen=True)
class _Exchange:
    """The forward of a module of experts on all ranks together."""

    own: Callable[..., Tensor]
    """The module's forward, with the experts of this rank."""
    name: str
    dispatcher: AllToAll

    def __call__(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``[T, h]``, ``[T, k]``, ``[T, k]`` -> ``[T, h]``."""
        fits = tokens.dim() == 2 and chosen.dim() == 2 and weights.shape == chosen.shape
        if not fits or chosen.is_floating_point() or not weights.is_floating_point():
            raise ConfigError(
                f"{self.name}: expert parallelism needs tokens [T, h], chosen experts [T, k] and their weights [T, k]; "
                f"the forward received {_shape(tokens)}, {_shape(chosen)} and {_shape(weights)}"
            )
        sent = self.dispatcher.dispatch(tokens, Routing(chosen, weights))
        if not len(sent.rows):
            # The module's code would lose the graph, through which other ranks receive gradients from this one.
            return sent.combine(sent.rows * sent.probs[:, None].to(sent.rows.dtype))
        counts = torch.tensor(sent.counts, device=tokens.device)
        local = torch.arange(len(counts), device=tokens.device).repeat_interleave(counts)
        return sent.combine(self.own(sent.rows, local[:, None], sent.probs[:, None]))


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
