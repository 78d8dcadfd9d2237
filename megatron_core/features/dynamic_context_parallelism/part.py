"""Cuts the packed samples of a global batch into documents, and each document into the parts of its ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_core.datasets.loader import DOCUMENT_LENGTHS, Batch
from megatron_core.features.dynamic_context_parallelism.plan import DocumentRanks, assign
from megatron_core.features.dynamic_context_parallelism.settings import DynamicContextConfig
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.parts import RunPart

LINEAR_WORK = 12
"""Times the hidden size: the keys whose attention costs as much as the matrix products of a token. A layer of width h
has 24 h^2 operations per token for matrices and 2 h per visible key, of which there are s / 2 on average."""


@dataclass(frozen=True)
class SampleDocument:
    """The tokens ``start`` to ``stop`` of a sample."""

    batch: Mapping[str, Tensor]
    row: int
    start: int
    stop: int

    @property
    def counts(self) -> bool:
        """Whether a token counts in the loss."""
        return bool(self._tokens("loss_mask").any())

    def sequence(self, multiple: int) -> Batch:
        """The document as a batch of one sequence, padded at its end to a multiple of tokens that do not count."""
        padding = -(self.stop - self.start) % multiple
        names = ("tokens", "labels", "loss_mask", "position_ids")
        entries = {name: pad(self._tokens(name), (0, padding))[None] for name in names if name in self.batch}
        if "position_ids" not in entries:  # a table of positions has none for the padding
            positions = torch.arange(self.start, self.stop + padding)[None]
            entries["position_ids"] = positions.clamp_(max=self.batch["tokens"].shape[1] - 1)
        of_sample = ("sample_index", "source")
        return entries | {name: self.batch[name][self.row, None] for name in of_sample if name in self.batch}

    def _tokens(self, name: str) -> Tensor:
        return self.batch[name][self.row, self.start : self.stop]


def documents_of(batches: Sequence[Batch]) -> Iterator[SampleDocument]:
    """The documents of a global batch, in order; without their lengths each sample is one."""
    for batch in batches:
        samples, length = batch["tokens"].shape
        rows = batch[DOCUMENT_LENGTHS].tolist() if DOCUMENT_LENGTHS in batch else [[length]] * samples
        for row, lengths in enumerate(rows):
            start = 0
            for size in filter(None, lengths):
                yield SampleDocument(batch, row, start, start + size)
                start += size


class DividedDocuments(RunPart):
    """One micro-batch for each document of which this rank has a part."""

    divides_batches = True

    def __init__(self, run: Any) -> None:
        self.run = run
        self.group = run.groups.group("dp-cp")
        self.settings = run.config.parallel.section(DynamicContextConfig)
        self.linear = LINEAR_WORK * run.config.model.hidden_size

    def micro_batches(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        """This rank's part of the documents with tokens that count, in the order of ``assign``."""
        documents = [*documents_of(batches)]
        # Ranks without a micro-batch could not sum gradients: a batch without such tokens keeps one document.
        documents = [document for document in documents if document.counts] or documents[:1]
        placements = assign(
            [document.stop - document.start for document in documents],
            self.group.size(),
            self.settings.max_seqlen_per_dp_cp_rank or 0,
            smallest=self.settings.min_dynamic_context_parallel_size,
            linear=self.linear,
        )
        rank = self.group.rank()
        return [
            self._part(documents[placement.document], placement)
            for placement in placements
            if placement.first <= rank < placement.first + placement.size
        ]

    def _part(self, document: SampleDocument, placement: DocumentRanks) -> MicroBatch:
        size = placement.size
        split = replace(self.run.split, cp_rank=self.group.rank() - placement.first, cp_size=size)
        # Both chunks of a rank have equal lengths, and with sequence parallelism all tensor-parallel ranks.
        multiple = lcm(2 * size if size > 1 else 1, size * split.tp_size if split.sequence_parallel else 1)
        sequence = document.sequence(multiple)
        micro_batch = MicroBatch.of(sequence, split, self.run.world.device)
        # Dropout depends on the positions in the whole sample.
        return replace(micro_batch, positions=micro_batch.positions + document.start, sharing_ranks=size)
