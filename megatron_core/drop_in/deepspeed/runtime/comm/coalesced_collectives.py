"""``reduce_scatter_coalesced``; the quantized one is not available."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_core.drop_in.unsupported import refused


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
    """Return this rank's part of the mean of each tensor over ``group``; tensors of one dtype are sent together.

    A tensor of n elements is flattened and divided into parts of ``ceil(n / ranks)``: the last parts may be shorter.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    parts: list[Tensor] = [tensor.new_empty(0) for tensor in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        rows = tensors[own[0]].new_zeros(ranks, sum(sizes[index] for index in own))
        received = rows.new_empty(rows.shape[1])
        for index, slot in zip(own, rows.split([sizes[index] for index in own], dim=1), strict=True):
            padded = tensors[index].new_zeros(slot.numel())
            padded[: tensors[index].numel()] = tensors[index].reshape(-1)
            slot.copy_(padded.view_as(slot))
        dist.reduce_scatter_tensor(received, rows.div_(ranks).view(-1), group=group)
        for index, part in zip(own, received.split([sizes[index] for index in own]), strict=True):
            start = min(rank * sizes[index], tensors[index].numel())
            parts[index] = part[: tensors[index].numel() - start]
    return parts


all_to_all_quant_reduce = refused(
    "deepspeed.runtime.comm.coalesced_collectives.all_to_all_quant_reduce",
    'set "communication_data_type": "bf16", which halves what is sent (docs/deepspeed_keys.md)',
)
