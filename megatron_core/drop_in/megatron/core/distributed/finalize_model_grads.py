"""Reduction of the gradients of a step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.core.process_groups_config import check_groups
from megatron.core.transformer.exported import update_expert_biases_of
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron_core.features.experts.part import update_quantile_biases
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.current import current


def finalize_model_grads(
    model: Sequence[Any],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Reduce the gradients of all chunks; with ``num_tokens`` divide them by its sum over all ranks.

    Gradients of norms under sequence parallelism, of shared keys and of tied embeddings are completed before data
    parallelism sums them. Expert biases are updated from the loads, or by the quantiles of logits, of the step.
    For models with ``calculate_per_token_loss``, ``num_tokens`` is the number of tokens in this rank's loss; the value
    of the last stage is used. Raises ConfigError if ``pg_collection`` differs from the current groups.
    """
    check_groups(pg_collection, ("tp", "pp", "embd", "pos_embd", "dp_cp", "tp_dp_cp"), "finalize_model_grads")
    groups = current()
    for chunk in model:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    for chunk in model:
        update_expert_biases_of(chunk.modules(), groups.group("tp-dp-cp"))
        update_quantile_biases(module for module in chunk.modules() if module.training)
    if num_tokens is not None:
        is_last = groups.index("pp") == groups.size("pp") - 1
        total = num_tokens.detach().to(torch.float64) * is_last
        for axes in ("dp-cp", "pp"):
            all_reduce_(total, groups.group(axes))
        for chunk in model:
            chunk.scale_gradients(1.0 / max(total.item(), 1.0))


def _get_main_grad_attr(param: torch.nn.Parameter) -> str:
    return "main_grad" if hasattr(param, "main_grad") else "grad"


def _unshard_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor of the caller as a whole tensor with its attributes; other tensors as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    vars(whole).update(vars(tensor))
    return whole


def _reshard_if_dtensor(tensor_to_shard: torch.Tensor, reference_tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor distributed as ``reference_tensor``; ``reference_tensor`` if it is not a DTensor."""
    if not isinstance(reference_tensor, DTensor):
        return reference_tensor
    reference: Any = reference_tensor
    sharded = distribute_tensor(tensor_to_shard, reference.device_mesh, reference.placements)
    vars(sharded).update(vars(reference_tensor))
    return sharded
