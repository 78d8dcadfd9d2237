"""Gradients of which each rank has only a part, made whole before they are reduced over data-parallel ranks.

All sums here are linear, so that the data-parallel sum may come after them. It does: each rank then still has whole
gradients, and nothing has to be assumed about which of their shards lie on which rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import spec_of


def complete_gradients(bucket: Bucket, groups: ParallelGroups) -> None:
    """Sum a bucket's partial gradients over the axis that its kind names."""
    if bucket.kind.partial == "tp":
        all_reduce_(bucket.grads, groups.group("tp"))
    elif bucket.kind.partial == "tied":
        all_reduce_(bucket.grads, groups.embedding)
    elif bucket.kind.partial == "kv":
        for parameter in bucket.parameters:
            _sum_shared_rows(parameter, parameter.main_grad, groups.group("tp"))


def _sum_shared_rows(parameter: nn.Parameter, grad: Tensor, tp_group: Group) -> None:
    """Sum the rows that several tensor-parallel ranks hold (keys and values of a group) over their holders."""
    spec = spec_of(parameter)
    pieces = [piece for held in spec.ranges for piece in held]
    shared = sorted({piece for piece in pieces if pieces.count(piece) > 1})
    at, start_of = 0, {}
    for start, stop in shared:
        start_of[start, stop], at = at, at + stop - start
    total = torch.zeros((at, *grad.shape[1:]), dtype=grad.dtype, device=grad.device)
    mine = [(local, start_of[piece]) for local, piece in spec.shared_local()]
    for (first, last), place in mine:
        total[place : place + last - first] = grad[first:last]
    all_reduce_(total, tp_group)
    for (first, last), place in mine:
        grad[first:last] = total[place : place + last - first]
