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
    mla_rotary_interleaved: bool = False,
) -> Tensor:
    """Rotate the first r channels of heads ``[s, b, heads, d]`` by angles ``[s, 1, 1, r]``, times ``mscale``.

    ``RotaryEmbedding`` returns the angles. With the borders ``cu_seqlens`` of documents, heads are ``[s, heads, d]``,
    and each document begins at the first angle, unless there is one for each token. ``mla_rotary_interleaved`` first
    separates even and odd channels.
    """
    kinds = config.rotary_interleaved, mla_rotary_interleaved
    if cu_seqlens is None:
        return _apply_rotary_pos_emb_bshd(t, freqs, *kinds, mscale=mscale)
    return _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, *kinds, mscale=mscale, cp_group=cp_group)


def _apply_rotary_pos_emb_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Group | None = None,
) -> Tensor:
    if cp_group is not None and cp_group.size() > 1:
        raise ConfigError(
            "apply_rotary_pos_emb: cu_seqlens with context parallelism is not supported; pass the angles of the tokens "
            "of this rank without cu_seqlens"
        )
    if len(freqs) != len(t):
        lengths = cu_seqlens.diff().tolist()
        freqs = freqs[torch.cat([torch.arange(length, device=freqs.device) for length in lengths])]
    kinds = rotary_interleaved, mla_rotary_interleaved
    return _apply_rotary_pos_emb_bshd(t[:, None], freqs, *kinds, mscale=mscale).squeeze(1)


def _apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    **others: Any,
) -> Tensor:
    turned, rest = t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], dim=-1)
    if mla_rotary_interleaved:
        turned = torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1)
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
