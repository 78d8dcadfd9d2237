"""How sequences are cut over the ranks, and the part of a micro-batch that one rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.groups import ParallelGroups

Range = tuple[int, int]


def zigzag(length: int, rank: int, size: int) -> tuple[Range, ...]:
    """The positions, as half-open ranges, that context-parallel rank ``rank`` of ``size`` has of a sequence.

    Of 2 ``size`` equal chunks rank r has r and 2 ``size`` - 1 - r, so that all ranks have the same work in causal
    attention. Source: Megatron-LM; Zhu, "ring-flash-attention".
    Errors: ``LayoutError`` for a length that 2 ``size`` does not divide.
    """
    if size == 1:
        return ((0, length),)
    chunk, rest = divmod(length, 2 * size)
    if rest:
        raise LayoutError(
            f"a sequence of {length} tokens cannot be cut into 2 x {size} chunks for context_parallel_size={size}; "
            f"use a multiple of {2 * size}"
        )
    return tuple((i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank))


@dataclass(frozen=True)
class SequenceSplit:
    """This rank's part of every sequence.

    Two cuts follow one another. The *local* sequence is what attention, matrix products and the loss of this rank work
    on: with context parallelism two chunks of the whole one (``zigzag``), else all of it. The *residual* sequence is
    what the rank holds outside the matrix products: with sequence parallelism run ``tp_rank`` of ``tp_size`` equal runs
    of the local one (Korthikanti et al. 2022, section 4.2.2), else all of it. Whatever depends on where a token stands
    (embedding, rotary angles, dropout) is given ``positions`` and derives none from a rank.
    """

    tp_rank: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    cp_rank: int = 0
    cp_size: int = 1

    @classmethod
    def of(cls, groups: ParallelGroups, *, sequence_parallel: bool) -> SequenceSplit:
        """The split in a layout."""
        return cls(groups.index("tp"), groups.size("tp"), sequence_parallel, groups.index("cp"), groups.size("cp"))

    @property
    def owns_loss(self) -> bool:
        """Whether this rank's losses count in a sum over all ranks: tensor-parallel ranks compute copies of them,
        context-parallel ranks those of their own tokens."""
        return self.tp_rank == 0

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Positions, in their sequence of ``length`` tokens, of the local ones: int64 ``[n]``."""
        return torch.cat([torch.arange(*run, device=device) for run in zigzag(length, self.cp_rank, self.cp_size)])

    def local(self, whole: Tensor) -> Tensor:
        """The local part of ``[b, s, ...]``."""
        if self.cp_size == 1:
            return whole
        runs = zigzag(whole.shape[1], self.cp_rank, self.cp_size)
        return torch.cat([whole[:, first:stop] for first, stop in runs], dim=1)

    def residual(self, local: Tensor, dim: int = 0) -> Tensor:
        """The residual part of a local sequence that runs along ``dim``: a view."""
        length = self.residual_length(local.shape[dim])
        return local.narrow(dim, self.tp_rank * length, length) if self.sequence_parallel else local

    def residual_length(self, local_length: int) -> int:
        """Tokens of the residual part of a local sequence, which is what travels between stages."""
        return local_length // self.tp_size if self.sequence_parallel else local_length

    def message_length(self, length: int) -> int:
        """The same of a whole sequence of ``length`` tokens."""
        return self.residual_length(length // self.cp_size)


@dataclass(frozen=True)
class LaterTokens:
    """The tokens that follow the next one, for D depths: at depth k, from 0, that after k + 1 others."""

    labels: Tensor
    """``[D, b, n]`` int64; beyond the end of the sequence 0."""
    masks: Tensor
    """``[D, b, n]``, 1 where the loss of that token counts: it does as a next token, and is of the same document."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], depths: int, split: SequenceSplit, device: torch.device) -> LaterTokens:
        """From whole sequences, so that tokens of other ranks are found."""
        labels, masks = batch["labels"], batch["loss_mask"]
        documents = torch.zeros_like(labels)
        if (lengths := batch.get("document_lengths")) is not None:
            numbers = torch.arange(lengths.shape[1])
            documents = torch.stack([numbers.repeat_interleave(row) for row in lengths])
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for ahead in range(1, depths + 1):
            same = _ahead(documents + 1, ahead) == documents + 1
            for parts, whole in zip(found, (_ahead(labels, ahead), _ahead(masks, ahead) * same), strict=True):
                parts.append(split.local(whole).to(device, non_blocking=True))
        return cls(torch.stack(found[0]), torch.stack(found[1]))


def _ahead(x: Tensor, by: int) -> Tensor:
    """``[b, s]``: what stands ``by`` positions further on, 0 beyond the end."""
    return torch.cat([x[:, by:], x.new_zeros(x.shape[0], min(by, x.shape[1]))], dim=1)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch as one rank needs it: ``b`` sequences, ``n`` local tokens of each."""

    tokens: Tensor
    """``[b, n]`` int64."""
    labels: Tensor
    """``[b, n]`` int64, the token that follows each one."""
    loss_mask: Tensor
    """``[b, n]``, 1 where a token's loss counts, else 0."""
    positions: Tensor
    """``[n]`` int64, where the local tokens stand in their whole sequences."""
    sample_index: Tensor
    """``[b]`` int64, the global number of each sequence, which keys its dropout."""
    residual_length: int
    """Tokens of each sequence that this rank holds outside the matrix products."""
    position_ids: Tensor | None = None
    """``[b, n]`` int64, the positions that embeddings and rotary angles follow; None: ``positions``, in every
    sequence."""
    document_lengths: tuple[tuple[int, ...], ...] | None = None
    """Lengths of the documents in each whole sequence, which see nothing of one another; None: one document each. They
    stay on the host: attention by documents needs them as numbers, and to fetch them would wait for the device."""

    later: LaterTokens | None = None
    """What multi-token prediction needs; None: nothing."""
    source: Tensor | None = None
    """``[b]`` int64, the number of the data set that each sequence is from; None: there is no blend."""

    @classmethod
    def of(
        cls, batch: Mapping[str, Tensor], split: SequenceSplit, device: torch.device, *, later: int = 0
    ) -> MicroBatch:
        """A loader's batch of whole sequences, cut by ``split`` and moved to ``device``; ``later`` tokens beyond the
        next one are predicted, too."""
        length = batch["tokens"].shape[1]
        parts = {
            name: split.local(batch[name]).to(device, non_blocking=True)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
            if name in batch
        }
        source = batch.get("source")
        lengths = batch.get("document_lengths")
        return cls(
            **parts,
            positions=split.positions(length, device),
            sample_index=batch["sample_index"].to(device, non_blocking=True),
            residual_length=split.residual_length(parts["tokens"].shape[1]),
            document_lengths=None if lengths is None else tuple(tuple(filter(None, row)) for row in lengths.tolist()),
            later=LaterTokens.of(batch, later, split, device) if later else None,
            source=None if source is None else source.to(device, non_blocking=True),
        )
