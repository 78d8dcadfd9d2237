"""Attention of sequences that are split over ranks (DeepSpeed-Ulysses; Jacobs et al. 2023, arXiv:2309.14509)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single

from megatron_core.errors import ConfigError


class DistributedAttention(nn.Module):
    """Computes ``local_attention`` of whole sequences, for a part of the heads on each rank of a group.

    Arguments:
        local_attention: function or module of queries, keys and values ``[s, b, heads of the rank, d]``.
        sequence_process_group: the ranks that split a sequence of length s.
        scatter_idx: dimension of the heads; their number must be a multiple of the number of ranks.
        gather_idx: dimension of the sequence.
        sp_stream: no effect.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the output of the rank's part of the sequence.

        ``query``, ``key``, ``value``: ``[s / ranks, b, heads, d]``, in another order of dimensions with other indices.
        ``rotary_pos_emb``: cosines and sines ``[b, s, 1, r]``, by which the first r channels of queries and keys
        ``[s, b, heads, d]`` are rotated. Other arguments are those of ``local_attention``.
        """
        query, key, value = (self._exchange(x, self.scatter_idx, self.gather_idx) for x in (query, key, value))
        if rotary_pos_emb is not None:
            cos, sin = (x.permute(1, 0, 2, 3) for x in rotary_pos_emb)
            query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        output = self.local_attn(query, key, value, *args, **kwargs)
        return self._exchange(output, self.gather_idx, self.scatter_idx)

    def _exchange(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        """Split the dimension ``scatter`` over the ranks, and join their parts of ``gather``."""
        ranks = dist.get_world_size(self.spg)
        if x.shape[scatter] % ranks:
            raise ConfigError(
                f"DistributedAttention: dimension {scatter} of {tuple(x.shape)} must be a multiple of the {ranks} "
                "ranks of the sequence; repeat heads of keys and values, or use fewer ranks"
            )
        parts = torch.stack(x.chunk(ranks, dim=scatter))
        received = all_to_all_single(torch.empty_like(parts), parts, group=self.spg)
        return torch.cat(received.unbind(), dim=gather)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat([rotated * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)
