"""Splits sequences over the ranks; ``MicroBatch`` is one rank's part of a micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.groups import ParallelGroups

Range = tuple[int, int]


def zigzag(length: int, rank: int, size: int) -> tuple[Range, ...]:
    """The positions of a sequence, as half-open ranges, held by context-parallel rank ``rank`` of ``size``.

    The sequence is cut into 2 ``size`` equal chunks; rank r holds chunks r and 2 ``size`` - 1 - r, so that causal
    attention costs the same on all ranks. Source: Megatron-LM; Zhu, "ring-flash-attention". Errors: ``LayoutError`` if
    the length is not a multiple of 2 ``size``.
    """
    if size == 1:
        return ((0, length),)
    chunk, remainder = divmod(length, 2 * size)
    if remainder:
        raise LayoutError(
            f"a sequence of {length} tokens cannot be cut into 2 x {size} chunks for context_parallel_size={size}; "
            f"use a multiple of {2 * size}"
        )
    # A rank with the first part alone would have little work under a causal mask, and one with the last part nearly
    # twice the mean; an early and a late chunk together have the same number of pairs on each rank.
    return tuple((i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank))


@dataclass(frozen=True)
class SequenceSplit:
    """This rank's part of every sequence.

    There are two levels. The *local* sequence is the input of this rank's attention, matrix products and loss: two
    chunks of the whole sequence with context parallelism (``zigzag``), else all of it. The *residual* sequence is
    stored outside the matrix products: with sequence parallelism part ``tp_rank`` of ``tp_size`` equal parts of the
    local sequence (Korthikanti et al. 2022, section 4.2.2), else all of it. Operations that depend on a token's
    position (embedding, rotary angles, dropout) take ``positions`` and never derive them from a rank.
    """

    tp_rank: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    cp_rank: int = 0
    cp_size: int = 1

    @classmethod
    def of(cls, groups: ParallelGroups, *, sequence_parallel: bool) -> "SequenceSplit":
        """The split of a layout."""
        # From the axes and not from ranks of groups, so that a plan without communicators has the same split.
        return cls(groups.index("tp"), groups.size("tp"), sequence_parallel, groups.index("cp"), groups.size("cp"))

    @property
    def owns_loss(self) -> bool:
        """Whether this rank's losses count in a sum over all ranks: tensor-parallel ranks compute identical losses,
        context-parallel ranks compute those of different tokens."""
        return self.tp_rank == 0

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Positions of the local tokens in their sequence of ``length`` tokens: int64 ``[n]``."""
        return torch.cat([torch.arange(*run, device=device) for run in zigzag(length, self.cp_rank, self.cp_size)])

    def local(self, sequences: Tensor) -> Tensor:
        """The local part of ``[b, s, ...]``."""
        # The usual case must not copy the batch.
        if self.cp_size == 1:
            return sequences
        runs = zigzag(sequences.shape[1], self.cp_rank, self.cp_size)
        return torch.cat([sequences[:, first:stop] for first, stop in runs], dim=1)

    def residual(self, local: Tensor, dim: int = 0) -> Tensor:
        """The residual part of a local sequence along ``dim``: a view."""
        length = self.residual_length(local.shape[dim])
        return local.narrow(dim, self.tp_rank * length, length) if self.sequence_parallel else local

    def residual_length(self, local_length: int) -> int:
        """Length of the residual part of a local sequence, which is the length of messages between stages."""
        return local_length // self.tp_size if self.sequence_parallel else local_length

    def message_length(self, length: int) -> int:
        """Length of the residual part of a whole sequence of ``length`` tokens."""
        return self.residual_length(length // self.cp_size)


@dataclass(frozen=True)
class LaterTokens:
    """The targets of multi-token prediction at D depths: at depth k = 0, 1, ... the token k + 2 positions ahead."""

    labels: Tensor
    """``[D, b, n]`` int64; 0 beyond the end of the sequence."""
    masks: Tensor
    """``[D, b, n]``, 1 where the token's loss counts: its mask is 1 as a next token and it is in the same document."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], depths: int, split: SequenceSplit, device: torch.device) -> "LaterTokens":
        """Build from whole sequences, because targets may be tokens of other ranks."""
        labels = batch["labels"]
        masks = batch["loss_mask"]
        # Without document lengths all tokens belong to document 0.
        documents = torch.zeros_like(labels)
        if (lengths := batch.get("document_lengths")) is not None:
            numbers = torch.arange(lengths.shape[1])
            documents = torch.stack([numbers.repeat_interleave(row) for row in lengths])
        by_name: tuple[list[Tensor], list[Tensor]] = ([], [])
        for ahead in range(1, depths + 1):
            # 1 is added so that the fill value 0 beyond the end equals no document.
            same = _ahead(documents + 1, ahead) == documents + 1
            for shifted, sequences in zip(by_name, (_ahead(labels, ahead), _ahead(masks, ahead) * same), strict=True):
                shifted.append(to_device(split.local(sequences), device))
        return cls(torch.stack(by_name[0]), torch.stack(by_name[1]))


def to_device(on_host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; a copy to a GPU does not block the host."""
    # A copy from pageable memory would wait for all work of the GPU.
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def _ahead(x: Tensor, by: int) -> Tensor:
    """``[b, s]`` shifted left by ``by`` positions, filled with 0."""
    return torch.cat([x[:, by:], x.new_zeros(x.shape[0], min(by, x.shape[1]))], dim=1)


@dataclass(frozen=True, kw_only=True)
class SequenceDetails:
    """Properties of ``b`` sequences with ``n`` tokens on this rank; None stands for the usual case."""

    positions: Tensor | None = None
    """``[n]`` int64, positions of the local tokens in their whole sequences; None: this rank's part of 0, 1, 2, ..."""
    sample_index: Tensor | None = None
    """``[b]`` int64, the global number of each sequence; dropout masks depend on it."""
    document_lengths: Sequence[Sequence[int]] | None = None
    """Lengths of the documents in each whole sequence; attention does not cross document boundaries. None: one document
    each. They stay on the host, because attention needs them as Python integers and reading them would synchronize."""
    loss_mask: Tensor | None = None
    """``[b, n]``, 1 where a token counts in the loss and in auxiliary losses, else 0; None: all tokens count."""
    later: LaterTokens | None = None
    """Targets of multi-token prediction; None without it."""
    sharing_ranks: int | None = None
    """Number of neighbouring dp-cp ranks over which the sequences are split; None: the ranks of context parallelism."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch(SequenceDetails):
    """One rank's part of a micro-batch: ``b`` sequences with ``n`` local tokens each."""

    tokens: Tensor
    """``[b, n]`` int64."""
    labels: Tensor
    """``[b, n]`` int64, the next token of each token."""
    loss_mask: Tensor = field()
    positions: Tensor = field()
    sample_index: Tensor = field()
    residual_length: int
    """Length of the residual sequence."""
    position_ids: Tensor | None = None
    """``[b, n]`` int64, positions for embeddings and rotary angles; None: ``positions`` for every sequence."""
    source: Tensor | None = None
    """``[b]`` int64, the data set of each sequence; None without a blend."""

    @classmethod
    def of(
        cls, batch: Mapping[str, Tensor], split: SequenceSplit, device: torch.device, *, later: int = 0
    ) -> "MicroBatch":
        """Cut a loader's batch of whole sequences by ``split`` and move it to ``device``; ``later`` is the number of
        additional tokens to predict."""
        length = batch["tokens"].shape[1]
        entries: dict[str, Any] = {
            name: to_device(split.local(batch[name]), device)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
            if name in batch
        }
        source = batch.get("source")
        lengths = batch.get("document_lengths")
        return cls(
            **entries,
            positions=split.positions(length, device),
            sample_index=to_device(batch["sample_index"], device),
            residual_length=split.residual_length(entries["tokens"].shape[1]),
            # Rows are padded with 0 by the loader, because a batch is a tensor.
            document_lengths=None if lengths is None else tuple(tuple(filter(None, row)) for row in lengths.tolist()),
            later=LaterTokens.of(batch, later, split, device) if later else None,
            source=None if source is None else to_device(source, device),
        )
