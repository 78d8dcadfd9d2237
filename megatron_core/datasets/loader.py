"""Micro-batches of one data-parallel rank, from the position in the data order; optionally with document boundaries."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from megatron_core.config import DataConfig
from megatron_core.datasets.base import Dataset, sources_of
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import Tokenizer

DOCUMENT_LENGTHS = "document_lengths"
"""The entry of a batch that stays on the host, because attention by documents needs the lengths as Python integers."""


@dataclass(frozen=True)
class Packing:
    """The settings `--reset-position-ids` and `--reset-attention-mask`.

    A document ends with its end-of-document token `eod`; the last one is cut at the end of the sequence.
    """

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool

    def entries(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """The entries of a batch for the documents in `tokens` [b, s].

        position_ids, if they restart: int64 [b, s]. document_lengths, if attention is restricted: int64 [b, d] for at
        most d documents per sequence, padded with 0.
        """
        added = {}
        if self.reset_position_ids:
            added["position_ids"] = restarted_positions(tokens, self.eod)
        if self.reset_attention_mask:
            added[DOCUMENT_LENGTHS] = document_lengths(tokens, self.eod)
        return added


def packing_of(data: DataConfig, tokenizer: Tokenizer | None) -> Packing | None:
    """The packing of a configuration; None if sequences are not divided. ConfigError without an `eod`."""
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    if tokenizer is None or tokenizer.eod is None:
        flag = "--reset-position-ids" if data.reset_position_ids else "--reset-attention-mask"
        raise ConfigError(
            f"{flag} needs an end-of-document id, and the tokenizer has none; give a --tokenizer-type "
            f"whose vocabulary has one, or remove {flag}"
        )
    return Packing(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask)


def document_lengths(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Lengths of the documents in each row of `tokens` [b, s]: int64 [b, d], padded with 0."""
    begins = _begins(tokens, eod)
    rows, positions = np.nonzero(begins)
    # A document ends where the next document of the same row starts; the last one at the end of the row.
    ends = np.append(positions[1:], 0)
    ends[ends == 0] = tokens.shape[1]
    lengths = np.zeros((len(tokens), begins.sum(axis=1).max(initial=0)), dtype=np.int64)
    lengths[rows, begins.cumsum(axis=1)[rows, positions] - 1] = ends - positions
    return lengths


def restarted_positions(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Positions of `tokens` [b, s] within their documents, from 0: int64 [b, s]."""
    positions = np.arange(tokens.shape[1], dtype=np.int64)
    return positions - np.maximum.accumulate(np.where(_begins(tokens, eod), positions, 0), axis=1)


def _begins(tokens: np.ndarray, eod: int) -> np.ndarray:
    """True where a document starts: at a row's first token and after each `eod`."""
    begins = np.ones(tokens.shape, dtype=bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    return begins


Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """The arguments of a step."""

    consumed_samples: int
    num_microbatches: int
    length: int


@dataclass(eq=False)
class BatchLoader:
    """The micro-batches of a step, as a pure function of the number of samples consumed before it.

    Micro-batch m of data-parallel rank r has the global samples consumed + (m dp + r) b + [0, b). There is no other
    state and no random generator, so a run may resume, or change dp, at any step.

    num_workers: threads that read micro-batches ahead (token files are memory-mapped, so a thread waits for the disk
    without blocking the others); 0 reads on demand. pin_memory: batches are in page-locked memory, which a GPU can copy
    while it computes.
    """

    dataset: Dataset
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    vocab_size: int
    packing: Packing | None = None
    num_workers: int = field(default=1, kw_only=True)
    pin_memory: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size} must be at least 1, and data_parallel_rank="
                f"{self.data_parallel_rank} in [0, {self.data_parallel_size})"
            )
        self._is_blend = len(sources_of(self.dataset)) > 0
        self._threads = ThreadPoolExecutor(self.num_workers, "batch_loader") if self.num_workers else None
        self._ahead: tuple[_Step, list[Future[Batch]]] | None = None

    def step(self, consumed_samples: int, num_microbatches: int, length: int | None = None) -> list[Batch]:
        """This rank's micro-batches of the step after `consumed_samples` samples.

        Each has, with b = micro_batch_size and s = sequence length, or `length` if that is less: tokens, labels int64
        [b, s]; loss_mask float32 [b, s]; sample_index int64 [b], the number of each sample in the global order. With a
        blend also source int64 [b], the number of each sample's data set. With `packing`, or if samples have them,
        position_ids and document_lengths as in `Packing.entries`. DataError: a token id outside the model's vocabulary.
        """
        # A batch is a function of the position alone, so batches that were read ahead for another position, for example
        # before a rollback, are dropped and read again.
        request = self._asked(consumed_samples, num_microbatches, length)
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead[0] == request:
            return [future.result() for future in ahead[1]]
        return [self._micro_batch(request, micro) for micro in range(num_microbatches)]

    def prefetch(self, consumed_samples: int, num_microbatches: int, length: int | None = None) -> None:
        """Start reading that step in the background; `step` with the same arguments returns it."""
        if self._threads is None:
            return
        request = self._asked(consumed_samples, num_microbatches, length)
        reading = [self._threads.submit(self._micro_batch, request, micro) for micro in range(num_microbatches)]
        self._ahead = (request, reading)

    def _asked(self, consumed_samples: int, num_microbatches: int, length: int | None) -> _Step:
        return _Step(consumed_samples, num_microbatches, length or self.dataset.sequence_length)

    def _micro_batch(self, step: _Step, micro: int) -> Batch:
        size = self.micro_batch_size
        dataset = cast(Any, self.dataset)
        first = step.consumed_samples + (micro * self.data_parallel_size + self.data_parallel_rank) * size
        indices = range(first, first + size)
        samples: list[Any] = [dataset[index] for index in indices]
        keys = ("tokens", "labels", "loss_mask")
        batch = {key: np.stack([sample[key][: step.length] for sample in samples]) for key in keys}
        # On the host, before the copy to a GPU: there a wrong id ends the process without naming the sample.
        self._check(batch["tokens"], first)
        self._check(batch["labels"], first)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        tensors["sample_index"] = torch.tensor(indices, dtype=torch.int64)
        if self._is_blend:
            tensors["source"] = torch.tensor([dataset.source_of(index) for index in indices])
        if self.packing is not None:
            entries = self.packing.entries(batch["tokens"])
            tensors |= {name: torch.from_numpy(array) for name, array in entries.items()}
        if DOCUMENT_LENGTHS in samples[0]:  # the data set has packed its documents itself
            tensors["position_ids"] = torch.from_numpy(np.stack([sample["position_ids"] for sample in samples]))
            lengths = [torch.from_numpy(sample[DOCUMENT_LENGTHS]) for sample in samples]
            tensors[DOCUMENT_LENGTHS] = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
        return {key: tensor.pin_memory() for key, tensor in tensors.items()} if self.pin_memory else tensors

    def _check(self, ids: np.ndarray, first: int) -> None:
        """DataError for ids outside the vocabulary, which would read wrong memory or fail on a GPU without a clear
        message."""
        lowest = int(ids.min())
        highest = int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"token id {wrong} in samples {first} to {first + self.micro_batch_size - 1} is not in the "
                f"model's vocabulary of {self.vocab_size} tokens; give the tokenizer that made the data "
                "with --tokenizer-model, or a larger --vocab-size"
            )
