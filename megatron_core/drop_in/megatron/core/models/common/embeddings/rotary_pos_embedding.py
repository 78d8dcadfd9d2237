"""The angles of rotary positions, and the rotation of heads."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError
from megatron_core.features.positions.frequencies import llama3_frequencies, yarn_frequencies
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.transformer.rotary import plain_frequencies


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Group | None = None,
    mla_rotary_interleaved: bool = False,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first r channels of heads ``[s, b, heads, d]`` by angles ``[s, 1, 1, r]``, times ``mscale``.

    ``RotaryEmbedding`` returns the angles. With the borders ``cu_seqlens`` of documents, heads are ``[s, heads, d]``,
    this rank's part of each document. Each document begins at the first angle, unless there are angles for the whole
    pack: as many as tokens or, if ``max_seqlen`` is given, more than it. ``mla_rotary_interleaved`` first separates
    even and odd channels.
    """
    kinds = config.rotary_interleaved, mla_rotary_interleaved
    if cu_seqlens is None:
        return _apply_rotary_pos_emb_bshd(t, freqs, *kinds, mscale=mscale)
    return _apply_rotary_pos_emb_thd(
        t, cu_seqlens, freqs, *kinds, mscale=mscale, cp_group=cp_group, max_seqlen=max_seqlen
    )


def _apply_rotary_pos_emb_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Group | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    size, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    borders = cu_seqlens.to(torch.int64)
    lengths = borders.diff() // size
    ends = lengths.cumsum(0)
    tokens = torch.arange(len(t), device=t.device)
    # Padding after the last document counts as a part of it.
    document = torch.bucketize(tokens, ends, right=True).clamp(max=len(lengths) - 1)
    positions, length = tokens - (ends - lengths)[document], lengths[document]
    if size > 1:
        # Of 2 x size equal chunks of a document, a rank has the chunk ``rank`` and the one as far from the end.
        half = length // 2
        later = size * length - (rank + 1) * half + positions - half
        positions = torch.where(positions < half, rank * half + positions, later)
    if len(freqs) == borders[-1] if max_seqlen is None else len(freqs) > max_seqlen:
        positions = positions + borders[document]
    angles = freqs[positions.clamp(max=len(freqs) - 1)]
    kinds = rotary_interleaved, mla_rotary_interleaved
    return _apply_rotary_pos_emb_bshd(t[:, None], angles, *kinds, mscale=mscale).squeeze(1)


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


class RotaryEmbedding(nn.Module):
    """Angles position x base^(-2i/r) of the first ``rotary_percent`` of the channels of a head, each twice.

    They are the ``rotary_pos_emb`` of ``TransformerBlock`` and ``TransformerLayer``; ``GPTModel`` computes its own.
    ``use_cpu_initialization`` has no effect. With ``cp_group`` they are the angles of this rank's tokens.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: Group | None = None,
    ) -> None:
        super().__init__()
        frequencies = plain_frequencies(int(kv_channels * rotary_percent), float(rotary_base))
        if rope_scaling:
            frequencies = llama3_frequencies(frequencies, rope_scaling_factor)
        self.frequencies = frequencies / (seq_len_interpolation_factor or 1.0)
        self.rotary_interleaved, self.cp_group = rotary_interleaved, cp_group

    @property
    def inv_freq(self) -> Tensor:
        """The frequencies ``[r/2]`` in float32."""
        return self.frequencies.float()

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of ``max_seq_len`` positions from ``offset``, each once: ``[s, r/2]`` float64."""
        positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float64, device=self.frequencies.device)
        return torch.outer(positions, self.frequencies)

    def get_cos_sin(self, max_seq_len: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of ``get_freqs_non_repeated``."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return angles.cos(), angles.sin()

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: Any,
        packed_seq_params: Any = None,
    ) -> int:
        """Return the number of positions for ``forward``: of the longest document, or of whole sequences of which
        ``transformer_input`` ``[s, b, h]``, or ``transformer.input_tensor`` on a later stage, is this rank's part.

        Raises ConfigError for an ``inference_context``: the engine computes positions in generation.
        """
        if inference_context is not None:
            raise ConfigError("get_rotary_seq_len: inference_context is not supported; generate with the engines")
        if packed_seq_params is not None and packed_seq_params.max_seqlen_q is not None:
            return int(max(packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv))
        received = getattr(transformer, "input_tensor", None)
        length = len(transformer_input if received is None else received)
        if transformer_config.sequence_parallel:
            length *= transformer_config.tensor_model_parallel_size
        return length * int(transformer_config.context_parallel_size)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of ``max_seq_len`` positions from ``offset``: ``[s, 1, 1, r]`` float64.

        Angle i is at the channels i and r/2 + i, or 2i and 2i + 1 with ``rotary_interleaved``.
        """
        split = SequenceSplit()
        if self.cp_group is not None:
            split = SequenceSplit(cp_rank=self.cp_group.rank(), cp_size=self.cp_group.size())
        angles = torch.outer((split.positions(max_seq_len) + offset).to(torch.float64), self.frequencies)
        twice = torch.stack([angles, angles], -1).flatten(1) if self.rotary_interleaved else torch.cat([angles] * 2, -1)
        return twice[:, None, None, :]


class YarnRotaryEmbedding(RotaryEmbedding):
    """Angles of ``RotaryEmbedding`` with YaRN's frequencies (Peng et al. 2023), and the factor on cosine and sine."""

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        use_cpu_initialization: bool = False,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        correction_range_round_to_int: bool = True,
        cp_group: Any = None,
    ) -> None:
        super().__init__(
            kv_channels,
            rotary_percent,
            rotary_interleaved,
            seq_len_interpolation_factor,
            rotary_base,
            cp_group=cp_group,
        )
        settings = PositionConfig(
            use_rope_scaling=True,
            rope_scaling_type="yarn",
            rotary_base=rotary_base,
            rope_scaling_factor=scaling_factor,
            original_max_position_embeddings=original_max_position_embeddings,
            yarn_beta_fast=beta_fast,
            yarn_beta_slow=beta_slow,
            yarn_correction_range_round_to_int=correction_range_round_to_int,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
        )
        self.frequencies, self.magnitude = yarn_frequencies(self.frequencies, settings), settings.yarn_magnitude

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> tuple[Tensor, float]:  # type: ignore[override]
        """Return (angles ``[s, 1, 1, r]``, factor on cosine and sine); ``packed_seq`` has no effect."""
        return super().forward(max_seq_len, offset), self.magnitude


def _yarn_get_mscale(scale: float = 1, mscale: float = 1) -> float:
    return PositionConfig(rope_scaling_factor=scale).yarn_mscale(mscale)
