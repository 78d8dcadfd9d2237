"""Cuts the packed samples of a global batch into documents, and each document into the parts of its ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_core.datasets.loader import DOCUMENT_LENGTHS, Batch
from megatron_core.features.dynamic_context_parallelism.plan import assign
from megatron_core.features.dynamic_context_parallelism.settings import DynamicContextConfig
from megatron_core.parallel.micro_batch import MicroBatch, to_device
from megatron_core.training.parts import RunPart

LINEAR_WORK = 12
"""Times the hidden size: the keys whose attention costs as much as the matrix products of a token. A layer of width h
has 24 h^2 operations per token for matrices and 2 h per visible key, of which there are s / 2 on average."""


DROPOUTS = ("hidden_dropout", "attention_dropout", "lora_dropout")


@dataclass(frozen=True)
class SampleDocument:
    """The tokens ``start`` to ``stop`` of a sample."""

    batch: Mapping[str, Tensor]
    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def counts(self) -> bool:
        """Whether a token counts in the loss."""
        return bool(self.entry("loss_mask").any())

    def entry(self, name: str) -> Tensor:
        """The part of an entry of the batch that belongs to the document."""
        return self.batch[name][self.row, self.start : self.stop]

    def of_sample(self, name: str) -> Tensor:
        """The value of the sample, ``[1]``."""
        return self.batch[name][self.row, None]


def join_documents(documents: Sequence[SampleDocument], multiple: int) -> tuple[Batch, Tensor]:
    """The documents as a batch of one sequence, padded to a multiple of tokens that do not count, and the positions of
    its tokens in their samples; dropout depends on these."""
    lengths = [document.length for document in documents]
    padding = -sum(lengths) % multiple
    first = documents[0]
    names = [name for name in ("tokens", "labels", "loss_mask", "position_ids") if name in first.batch]
    batch = {
        name: pad(torch.cat([document.entry(name) for document in documents]), (0, padding))[None] for name in names
    }
    # The positions of the padding continue: attention over several ranks derives the positions of all from the first.
    stops = [*(document.stop for document in documents[:-1]), documents[-1].stop + padding]
    positions = torch.cat([torch.arange(document.start, stop) for document, stop in zip(documents, stops, strict=True)])
    # A table of positions has no row for padding after the end of the sample.
    batch.setdefault("position_ids", positions[None].clamp(max=first.batch["tokens"].shape[1] - 1))
    batch |= {name: first.of_sample(name) for name in ("sample_index", "source") if name in first.batch}
    if len(documents) > 1:
        batch[DOCUMENT_LENGTHS] = torch.tensor([[*lengths, *([padding] if padding else [])]])
    return batch, positions


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
    """Micro-batches of the documents of which this rank has a part: one for each that several ranks share, and of the
    others as many as have at most ``max_seqlen_per_dp_cp_rank`` tokens."""

    divides_batches = True

    def __init__(self, run: Any) -> None:
        self.run = run
        self.group = run.groups.group("dp-cp")
        self.settings = run.config.parallel.section(DynamicContextConfig)
        self.tokens = self.settings.max_seqlen_per_dp_cp_rank or 0
        self.linear = LINEAR_WORK * run.config.model.hidden_size
        self.drops = any(run.config.optional(name) for name in DROPOUTS)

    def micro_batches(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        """This rank's part of the documents with tokens that count, in the order of ``assign``."""
        documents = [*documents_of(batches)]
        # Ranks without a micro-batch could not sum gradients: a batch without such tokens keeps one document.
        documents = [document for document in documents if document.counts] or documents[:1]
        placements = assign(
            [document.length for document in documents],
            self.group.size(),
            self.tokens,
            smallest=self.settings.min_dynamic_context_parallel_size,
            linear=self.linear,
        )
        rank = self.group.rank()
        local = [ranks for ranks in placements if ranks.first <= rank < ranks.first + ranks.size]
        shared = [([documents[ranks.document]], ranks.first, ranks.size) for ranks in local if ranks.size > 1]
        packs = self._packs([documents[ranks.document] for ranks in local if ranks.size == 1])
        return [self._part(*arguments) for arguments in (*shared, *((pack, rank, 1) for pack in packs))]

    def _packs(self, documents: Sequence[SampleDocument]) -> list[list[SampleDocument]]:
        """Documents of this rank alone that are computed together; with dropout those of one sample."""
        packs: list[list[SampleDocument]] = []
        last_by_key: dict[tuple[int, ...], list[SampleDocument]] = {}
        for document in documents:
            names = [*(["sample_index"] if self.drops else []), *(["source"] if "source" in document.batch else [])]
            key = tuple(int(document.of_sample(name)) for name in names)
            pack = last_by_key.get(key, [])
            if not pack or sum(packed.length for packed in pack) + document.length > self.tokens:
                last_by_key[key] = pack = []
                packs.append(pack)
            pack.append(document)
        return packs

    def _part(self, documents: Sequence[SampleDocument], first: int, size: int) -> MicroBatch:
        """This rank's part of documents that the ranks ``first`` to ``first + size - 1`` share."""
        split = replace(self.run.split, cp_rank=self.group.rank() - first, cp_size=size)
        # Both chunks of a rank have equal lengths, and with sequence parallelism all tensor-parallel ranks.
        multiple = lcm(2 * size if size > 1 else 1, size * split.tp_size if split.sequence_parallel else 1)
        batch, positions = join_documents(documents, multiple)
        micro_batch = MicroBatch.of(batch, split, self.run.world.device)
        positions = split.local(positions[None])[0]
        return replace(micro_batch, positions=to_device(positions, self.run.world.device), sharing_ranks=size)
