"""Proof that a model computes on parts of sequences what it computes on whole ones.

The forward of a caller's module may mix tokens anywhere: convolutions, recurrences, scores computed by hand, positions
counted from 0, labels shifted inside. So before the first forward the model runs twice without gradients on the first
tokens of the batch, whole and split, and the outputs of all modules are compared.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_core.any_model.context import ContextParallel
from megatron_core.any_model.data import evaluating
from megatron_core.any_model.tensor_trial import BOUNDS
from megatron_core.errors import ConfigError
from megatron_core.parallel.compiled import runs_graphs
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import gather_strings

CHUNK = 4
"""Tokens of a chunk in the trial."""
FEW = 0.1
"""Share of tokens that may differ in 16 bits, where rounding changes some tokens' choice of experts; mixing with the
token before, the least there is, changes one in ``CHUNK``."""

NO_ATTENTION = "no module calls scaled_dot_product_attention or an attention function of transformers"

Outputs = list[tuple[str, list[Tensor]]]
StageForward = Callable[[Sequence[Any], Mapping[str, Any], Any], Any]
"""A forward with its arguments, by order and by name, and the output of the stage before."""


def run_split(context: ContextParallel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the model on this rank's part of the arguments; the first forward is preceded by the proof."""
    if not context.is_proven:
        trial = SplitTrial(context, args, kwargs)
        trial.compare(lambda args, kwargs, _: context.model(*args, **kwargs))
        trial.finish(gather_strings(trial.fault, context.groups.whole, next(context.model.parameters()).device))
    (local_args, local_named), forward = context.split(args, kwargs)
    with forward:
        return context.model(*local_args, **local_named)


class SplitTrial:
    """Comparison of a model on whole and on split sequences: the first tokens of the arguments of a forward."""

    def __init__(self, context: ContextParallel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        _, (self.batch, length) = context.whole_arguments(args, kwargs)
        self.context = context
        self.length = min(length, 2 * context.size * CHUNK)
        self._difference = ""
        self._attentions = 0

        def shortened(tensor: Tensor) -> Tensor:
            return tensor[:, : self.length] if tensor.dim() > 1 and tensor.shape[1] == length else tensor

        # Rows without visible keys have arbitrary outputs, so padding is left out.
        named = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs and context.configs else kwargs
        self.args, self.named = tree_map_only(Tensor, shortened, (tuple(args), dict(named)))

    @torch.no_grad()
    def compare(self, run: StageForward, received: Any = None) -> Any:
        """Compare ``run`` on whole and on split sequences; return its output for whole ones.

        Collective over the ranks of a sequence. ``received`` is the output of the stage before for whole sequences.
        """
        context = self.context
        model = context.model
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with torch.random.fork_rng(_devices(model)), evaluating(model), _without_graphs(model):
            named = {**self.named, **context.without_cache}
            output, whole_outputs = _outputs(model, lambda: run(self.args, named, received))
            for buffer, value in buffers:
                buffer.copy_(value)
            (local_args, local_named), forward = context.split(self.args, self.named)
            local = tree_map_only(Tensor, self._local, received)
            with forward:
                _, split_outputs = _outputs(model, lambda: run(local_args, local_named, local))
        for buffer, value in buffers:
            buffer.copy_(value)
        self._difference = self._difference or _first_difference(
            whole_outputs, split_outputs, (self.batch, self.length), context
        )
        self._attentions += forward.attentions
        return output

    @property
    def fault(self) -> str:
        """The first module whose output differs, or the absence of attention; "" without a fault."""
        return self._difference or ("" if self._attentions else NO_ATTENTION)

    def _local(self, tensor: Tensor) -> Tensor:
        return self.context.local(tensor) if tensor.shape[:2] == (self.batch, self.length) else tensor

    def finish(self, faults: Sequence[str]) -> None:
        """Raise ``ConfigError`` for the first of the ``faults`` of all ranks that ran the model."""
        context = self.context
        # A stage may have no attention.
        differences = [text for text in faults if text not in ("", NO_ATTENTION)]
        differences += [NO_ATTENTION] if set(faults) == {NO_ATTENTION} else []
        if differences:
            raise ConfigError(
                f"context_parallel_size={context.size}: {type(context.model).__name__} does not compute on parts of "
                f"sequences what it computes on whole ones: {differences[0]}; let attention call "
                "scaled_dot_product_attention, give positions as the argument position_ids and labels shifted before "
                "the forward, or set context_parallel_size=1"
            )
        context.is_proven = True


def _without_graphs(model: nn.Module) -> AbstractContextManager[Any]:
    # Hooks of modules inside of a graph would compile another one.
    return torch.compiler.set_stance("force_eager") if any(map(runs_graphs, model.modules())) else nullcontext()


def _devices(model: nn.Module) -> list[torch.device]:
    device = next(model.parameters()).device
    return [device] if device.type == "cuda" else []


def _outputs(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, Outputs]:
    """Return the model's output, and the tensors that modules return, in the order in which their forwards end."""
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
    return result, [*outputs, (f"the result of {type(model).__name__}", _leaves(result))]


def _is_split_over_experts(module: nn.Module) -> bool:
    return any("ep" in spec_of(parameter).split_axes for parameter in module.parameters(recurse=False))


def _leaves(value: Any) -> list[Tensor]:
    # Outputs of transformers that pytree does not know are dicts.
    plain = dict(value) if isinstance(value, Mapping) else value
    return [x.detach() for x in tree_leaves(plain) if isinstance(x, Tensor) and x.is_floating_point()]


def _first_difference(whole: Outputs, split: Outputs, shape: tuple[int, int], context: ContextParallel) -> str:
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
