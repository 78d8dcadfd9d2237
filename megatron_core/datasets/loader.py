"""From the position in the data order to the micro-batches of one data parallel rank, with what their documents add."""

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
"""The entry of a batch that stays on the host: attention by documents needs the lengths as Python's numbers."""


@dataclass(frozen=True)
class Packing:
    """What `--reset-position-ids` and `--reset-attention-mask` ask of a batch.

    A document ends with its end-of-document token `eod`, which belongs to it; the sequence's end cuts the last one.
    """

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool

    def entries(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """What the documents of `tokens` [b, s] add to a batch.

        position_ids, if they restart: int64 [b, s]. document_lengths, if attention is cut: int64 [b, d] for at most
        d documents in a sequence, rows filled up with 0.
        """
        found = {}
        if self.reset_position_ids:
            found["position_ids"] = restarted_positions(tokens, self.eod)
        if self.reset_attention_mask:
            found[DOCUMENT_LENGTHS] = document_lengths(tokens, self.eod)
        return found


def packing_of(data: DataConfig, tokenizer: Tokenizer | None) -> Packing | None:
    """What a configuration asks for, or None if it leaves sequences whole; ConfigError without an `eod`."""
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    if tokenizer is None or tokenizer.eod is None:
        flag = "--reset-position-ids" if data.reset_position_ids else "--reset-attention-mask"
        raise ConfigError(
            f"{flag} finds documents by their end-of-document id, and there is none; give a --tokenizer-type "
            f"whose vocabulary has one, or remove {flag}"
        )
    return Packing(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask)


def document_lengths(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Lengths of the documents in each row of `tokens` [b, s]: int64 [b, d], rows filled up with 0."""
    begins = _begins(tokens, eod)
    rows, positions = np.nonzero(begins)
    # The next document of the same row begins where this one ends; the last of a row ends with the row.
    ends = np.append(positions[1:], 0)
    ends[ends == 0] = tokens.shape[1]
    lengths = np.zeros((len(tokens), begins.sum(axis=1).max(initial=0)), dtype=np.int64)
    lengths[rows, begins.cumsum(axis=1)[rows, positions] - 1] = ends - positions
    return lengths


def restarted_positions(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Positions in their documents of the `tokens` [b, s], from 0: int64 [b, s]."""
    positions = np.arange(tokens.shape[1], dtype=np.int64)
    return positions - np.maximum.accumulate(np.where(_begins(tokens, eod), positions, 0), axis=1)


def _begins(tokens: np.ndarray, eod: int) -> np.ndarray:
    """True where a document begins: at a row's first token and behind each `eod`."""
    begins = np.ones(tokens.shape, dtype=bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    return begins


Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """What a step asks for."""

    consumed_samples: int
    num_microbatches: int
    length: int


@dataclass(eq=False)
class BatchLoader:
    """The micro-batches of a step, as a pure function of the number of samples consumed before it.

    Micro-batch m of data parallel rank r holds the global samples consumed + (m dp + r) b + [0, b). There is
    no state but that number and no random generator is read, so a run may resume, or change dp, at any step.

    num_workers: threads that read micro-batches ahead (token files are mapped into memory, so that a thread waits for
    the disk and not for the others); 0 reads when asked. pin_memory: batches lie in page-locked memory, from which a
    GPU copies while it computes.
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
        workers = self.num_workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="batch_loader") if workers else None
        self._ahead: tuple[_Step, list[Future[Batch]]] | None = None

    def step(self, consumed_samples: int, num_microbatches: int, length: int | None = None) -> list[Batch]:
        """This rank's micro-batches of the step that follows `consumed_samples` samples.

        Each has, with b = micro_batch_size and s = sequence length, or `length` if that is less: tokens, labels
        int64 [b, s]; loss_mask float32 [b, s]; sample_index int64 [b], the number of each sample in the global order.
        Of a blend also source int64 [b], the number of the data set that each is from.
        With `packing`, position_ids and document_lengths as `Packing.entries` makes them; also where samples have them.
        DataError: a token id that the model's vocabulary does not have.
        """
        asked = self._asked(consumed_samples, num_microbatches, length)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == asked:
            return [future.result() for future in ahead[1]]
        return [self._micro_batch(asked, micro) for micro in range(num_microbatches)]

    def prefetch(self, consumed_samples: int, num_microbatches: int, length: int | None = None) -> None:
        """Begin to read that step in the background; `step` with the same arguments takes it from there."""
        if self._threads is None:
            return
        asked = self._asked(consumed_samples, num_microbatches, length)
        reading = [self._threads.submit(self._micro_batch, asked, micro) for micro in range(num_microbatches)]
        self._ahead = (asked, reading)

    def _asked(self, consumed_samples: int, num_microbatches: int, length: int | None) -> _Step:
        return _Step(consumed_samples, num_microbatches, length or self.dataset.sequence_length)

    def _micro_batch(self, step: _Step, micro: int) -> Batch:
        size, dataset = self.micro_batch_size, cast(Any, self.dataset)
        first = step.consumed_samples + (micro * self.data_parallel_size + self.data_parallel_rank) * size
        indices = range(first, first + size)
        samples: list[Any] = [dataset[index] for index in indices]
        keys = ("tokens", "labels", "loss_mask")
        batch = {key: np.stack([sample[key][: step.length] for sample in samples]) for key in keys}
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
        """An id past the embedding's rows reads foreign memory or stops a GPU with no word of the cause."""
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"token id {wrong} in samples {first} to {first + self.micro_batch_size - 1} is not in the "
                f"model's vocabulary of {self.vocab_size} tokens; give the tokenizer that made the data "
                "with --tokenizer-model, or a larger --vocab-size"
            )
