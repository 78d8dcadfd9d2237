"""Proof that a model computes on parts of sequences what it computes on whole ones.

The forward of a caller's module may mix tokens anywhere: convolutions, recurrences, scores computed by hand, positions
counted from 0, labels shifted inside. So before the first forward the model runs twice without gradients on the first
tokens of the batch, whole and split, and the outputs of all modules are compared.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_core.any_model.context import ContextParallel
from megatron_core.any_model.data import evaluating
from megatron_core.any_model.tensor_trial import BOUNDS
from megatron_core.errors import ConfigError
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import gather_strings

CHUNK = 4
"""Tokens of a chunk in the trial."""
FEW = 0.1
"""Share of tokens that may differ in 16 bits, where rounding changes some tokens' choice of experts; mixing with the
token before, the least there is, changes one in ``CHUNK``."""

Outputs = list[tuple[str, list[Tensor]]]


def run_split(context: ContextParallel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the model on this rank's part of the arguments; the first forward is preceded by the proof."""
    if not context.is_proven:
        _prove_split(context, args, kwargs)
        context.is_proven = True
    (local_args, local_named), forward = context.split(args, kwargs)
    with forward:
        return context.model(*local_args, **local_named)


@torch.no_grad()
def _prove_split(context: ContextParallel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Compare the model on whole and on split sequences; a collective call.

    Errors: ``ConfigError`` on all ranks that names the first module whose output differs.
    """
    _, (batch, length) = context.whole_arguments(args, kwargs)
    short = min(length, 2 * context.size * CHUNK)

    def shortened(tensor: Tensor) -> Tensor:
        return tensor[:, :short] if tensor.dim() > 1 and tensor.shape[1] == length else tensor

    # Rows without visible keys have arbitrary outputs, so padding is left out.
    named = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs and context.configs else kwargs
    args, named = tree_map_only(Tensor, shortened, (tuple(args), dict(named)))
    model = context.model
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(_devices(model)), evaluating(model):
        whole = _outputs(model, lambda: model(*args, **{**named, **context.without_cache}))
        for buffer, value in buffers:
            buffer.copy_(value)
        (local_args, local_named), forward = context.split(args, named)
        with forward:
            split = _outputs(model, lambda: model(*local_args, **local_named))
    for buffer, value in buffers:
        buffer.copy_(value)
    fault = _first_difference(whole, split, torch.Size((batch, short)), context)
    if not fault and not forward.attentions:
        fault = "no module calls scaled_dot_product_attention or an attention function of transformers"
    faults = gather_strings(fault, context.groups.whole, next(model.parameters()).device)
    reason = next((text for text in faults if text), "")
    if reason:
        raise ConfigError(
            f"context_parallel_size={context.size}: {type(model).__name__} does not compute on parts of sequences what "
            f"it computes on whole ones: {reason}; let attention call scaled_dot_product_attention, give positions as "
            "the argument position_ids and labels shifted before the forward, or set context_parallel_size=1"
        )


def _devices(model: nn.Module) -> list[torch.device]:
    device = next(model.parameters()).device
    return [device] if device.type == "cuda" else []


def _outputs(model: nn.Module, run: Callable[[], Any]) -> Outputs:
    """Return the tensors that modules return, in the order in which their forwards end, the model's last."""
    outputs: Outputs = []

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            outputs.append((name, [x for x in _leaves(output) if x.dim() > 1]))

        return hook

    modules = dict(model.named_modules())
    # With expert parallelism these get tokens of other ranks.
    experts = tuple(f"{name}." for name, module in modules.items() if _is_split_over_experts(module))
    named = {name: module for name, module in modules.items() if name and not name.startswith(experts)}
    handles = [m.register_forward_hook(record(f"{name} ({type(m).__name__})")) for name, m in named.items()]
    try:
        result = run()
    finally:
        for handle in handles:
            handle.remove()
    return [*outputs, (f"the result of {type(model).__name__}", _leaves(result))]


def _is_split_over_experts(module: nn.Module) -> bool:
    return any("ep" in spec_of(parameter).split_axes for parameter in module.parameters(recurse=False))


def _leaves(value: Any) -> list[Tensor]:
    # Outputs of transformers that pytree does not know are dicts.
    plain = dict(value) if isinstance(value, Mapping) else value
    return [x.detach() for x in tree_leaves(plain) if isinstance(x, Tensor) and x.is_floating_point()]


def _first_difference(whole: Outputs, split: Outputs, shape: torch.Size, context: ContextParallel) -> str:
    batch, length = shape
    calls = [Counter(name for name, _ in outputs) for outputs in (whole, split)]
    # Experts run as often as they have tokens, and get other tokens.
    comparable = {name for name in calls[0] if calls[0][name] == calls[1][name]}
    pairs = [[pair for pair in outputs if pair[0] in comparable] for outputs in (whole, split)]
    by_name: dict[str, list[list[Tensor]]] = {}
    for name, tensors in pairs[1]:
        by_name.setdefault(name, []).append(tensors)
    for name, expected in pairs[0]:
        for a, b in zip(expected, by_name[name].pop(0), strict=False):
            if a.dim() > 1 and a.shape[1] == length and len(a) == batch:
                local = context.local(a)
            elif a.dim() > 1 and len(a) == batch * length:  # rows of tokens, such as those of a router
                local = context.local(a.unflatten(0, (batch, length))).flatten(0, 1)
            elif name == whole[-1][0]:
                local = a
            else:  # rows of other tokens, such as those of one expert
                continue
            if local.shape == b.shape and _differ(local, b):
                what = "the loss, or another number, differs" if b.dim() == 0 else "its output differs"
                return f"{name} is the first that depends on tokens of other ranks ({what})"
    return ""


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of equal shape differ beyond rounding, in 16 bits for more than few tokens."""
    scale = a.abs().nan_to_num().max() if a.numel() else torch.zeros(())
    bound = float(BOUNDS.get(a.dtype, 0.0) * scale)
    wrong = ~torch.isclose(a, b, rtol=0.0, atol=bound, equal_nan=True)
    if a.dtype.itemsize > 2 or wrong.dim() < 3:
        return bool(wrong.any())
    return float(wrong.flatten(2).any(-1).double().mean()) > FEW
