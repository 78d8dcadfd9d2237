"""Auxiliary losses, such as those of routers, of models that are split over context-parallel ranks or cut into stages.

Source: Fedus et al. 2021 (arXiv 2101.03961), equations 4 to 6.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.any_model.context_attention import SplitForward, running_forward
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import reduce_from_region
from megatron_core.parallel.micro_batch import SequenceSplit

NAME = "load_balancing_loss_func"
"""The function of Mixtral, which other models copy."""
PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def split_balancing_loss(model: nn.Module) -> bool:
    """Let a transformers model compute the loss over the tokens of all ranks; return whether it has this function."""
    libraries = {sys.modules[type(module).__module__] for module in model.modules()}
    libraries = {library for library in libraries if hasattr(library, NAME)}
    for library in libraries:
        compute = getattr(library, NAME)
        if list(inspect.signature(compute).parameters) != PARAMETERS:
            return False
        if not hasattr(compute, "__wrapped__"):
            setattr(library, NAME, wraps(compute)(partial(_choose_loss, compute)))
    return bool(libraries)


def _choose_loss(
    compute: Callable[..., Any],
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Any:
    running = running_forward()
    if running is None or not isinstance(gate_logits, tuple) or num_experts is None:
        return compute(gate_logits, num_experts, top_k, attention_mask)
    return loss_over_ranks(running, gate_logits, num_experts, top_k)


def loss_over_ranks(forward: SplitForward, gate_logits: Sequence[Tensor], experts: int, choices: int) -> Tensor:
    """Return experts * sum_e f_e P_e over the tokens of all ranks.

    ``gate_logits``: ``[tokens, experts]`` of each layer. f_e is the mean number of choices of expert e per token and
    layer, P_e the mean probability of e; padding does not count.
    """
    group = forward.groups.whole
    dtype = torch.promote_types(gate_logits[0].dtype, torch.float32)
    counted = gate_logits[0].new_ones(len(gate_logits[0]), dtype=dtype)
    if forward.visible is not None:
        split = SequenceSplit(cp_rank=group.rank(), cp_size=group.size())
        counted = split.local(forward.visible).flatten().to(dtype)
    chosen = counted.new_zeros(experts)
    probabilities = counted.new_zeros(experts)
    for logits in gate_logits:
        weights = logits.softmax(-1)
        chosen.scatter_add_(0, weights.topk(choices).indices.flatten(), counted.repeat_interleave(choices))
        probabilities = probabilities + counted @ weights.to(dtype)
    rows = len(gate_logits) * counted.sum(0, keepdim=True)
    # Both are means over all tokens before they are multiplied: a mean of the ranks' products is another loss.
    totals = reduce_from_region(torch.cat([chosen, probabilities, rows]), group)
    return experts * (totals[:experts] @ totals[experts:-1]) / totals[-1] ** 2


def refuse_router_loss_in_stages(model: nn.Module, configs: Iterable[Any], argument: Any = None) -> None:
    """ConfigError if a forward with ``output_router_logits=argument`` adds up the logits of all layers."""
    if argument or any(getattr(config, "output_router_logits", False) for config in configs):
        raise ConfigError(
            f"pipeline_model_parallel_size: {type(model).__name__} adds up the router logits of all layers "
            "(output_router_logits=True in its config or batch), which are on several ranks; set it to False, or write "
            "the model as a megatron_core.PipelineModule (docs/pipeline_my_model.md)"
        )


def refuse_kept_losses(layers: Iterable[tuple[str, nn.Module]], outputs: Iterable[Tensor]) -> None:
    """ConfigError if a layer keeps a tensor with a gradient that ``outputs``, the message of its stage, do not contain.

    The last stage would add up such losses (``l_aux``) of its own layers alone.
    """
    modules = [item for prefix, layer in layers for item in layer.named_modules(prefix=prefix)]
    kept = [(f"{path}.{name}", value) for path, module in modules for name, value in vars(module).items()]
    losses = [(name, value) for name, value in kept if isinstance(value, Tensor) and value.grad_fn is not None]
    if not losses:
        return
    sent, nodes = set(), [tensor.grad_fn for tensor in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in sent:
            sent.add(node)
            nodes += [before for before, _ in node.next_functions]
    for name, value in losses:
        if value.grad_fn not in sent:
            raise ConfigError(
                f"pipeline_model_parallel_size: {name} has a gradient, and the output of its layer does not contain "
                "it, so later stages cannot add it to the loss; let the layers pass it on, detach it, or set "
                "pipeline_model_parallel_size=1"
            )
