"""Rotary positions of heads."""

from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import SequenceSplit


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Group | None = None,
) -> Tensor:
    """Rotate the first r channels of heads ``[s, b, heads, d]`` by angles ``[s, 1, 1, r]``, times ``mscale``.

    ``RotaryEmbedding`` returns the angles. Raises ConfigError for ``cu_seqlens``: pass the angles of the positions
    within documents.
    """
    if cu_seqlens is not None:
        raise ConfigError("apply_rotary_pos_emb: cu_seqlens is not supported; pass the angles of the tokens' positions")
    return _apply_rotary_pos_emb_bshd(t, freqs, config.rotary_interleaved, mscale=mscale)


def _apply_rotary_pos_emb_bshd(
    t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, mscale: float = 1.0, **others: Any
) -> Tensor:
    turned, rest = t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], dim=-1)
    cos, sin = ((mscale * function(freqs)).to(t.dtype) for function in (torch.cos, torch.sin))
    if rotary_interleaved:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cos + other * sin, rest], dim=-1)


def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Group) -> Tensor:
    """Return this context-parallel rank's part of the angles of whole sequences."""
    split = SequenceSplit(cp_rank=cp_group.rank(), cp_size=cp_group.size())
    return split.local(pos_emb.movedim(seq_dim, 1)).movedim(1, seq_dim)
