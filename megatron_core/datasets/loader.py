"""From the place in the data order to the micro-batches of one data parallel rank."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from megatron_core.datasets.base import Dataset
from megatron_core.errors import ConfigError, DataError

Batch = dict[str, torch.Tensor]


class BatchLoader:
    """The micro-batches of a step, as a pure function of the number of samples consumed before it.

    Micro-batch m of data parallel rank r holds the global samples consumed + (m dp + r) b + [0, b). There is
    no state but that number and no random generator is read, so a run may resume, or change dp, at any step.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        vocab_size: int,
    ) -> None:
        if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise ConfigError(
                f"micro_batch_size={micro_batch_size} must be at least 1, and data_parallel_rank="
                f"{data_parallel_rank} in [0, {data_parallel_size})"
            )
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self._vocab_size = vocab_size
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[tuple[int, int], Future[list[Batch]]] | None = None

    def step(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """This rank's micro-batches of the step that follows `consumed_samples` samples.

        Each has, with b = micro_batch_size and s = sequence length: tokens, labels, position_ids int64 [b,
        s]; loss_mask float32 [b, s]; sample_index int64 [b], the place of each sample in the global order.
        DataError: a token id that the model's vocabulary does not have.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (consumed_samples, num_microbatches):
            return ahead[1].result()
        return self._read(consumed_samples, num_microbatches)

    def prefetch(self, consumed_samples: int, num_microbatches: int) -> None:
        """Begin to read that step in the background; `step` with the same arguments takes it from there."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch_loader")
        place = (consumed_samples, num_microbatches)
        self._ahead = (place, self._thread.submit(self._read, *place))

    def _read(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        span = self._micro_batch_size * self._size
        first = consumed_samples + self._rank * self._micro_batch_size
        return [self._micro_batch(first + micro * span) for micro in range(num_microbatches)]

    def _micro_batch(self, first: int) -> Batch:
        indices = range(first, first + self._micro_batch_size)
        samples = [self._dataset[index] for index in indices]
        batch = {key: np.stack([sample[key] for sample in samples]) for key in ("tokens", "labels", "loss_mask")}
        self._check(batch["tokens"], first)
        self._check(batch["labels"], first)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        tensors["position_ids"] = torch.arange(tensors["tokens"].shape[1]).repeat(self._micro_batch_size, 1)
        tensors["sample_index"] = torch.tensor(indices, dtype=torch.int64)
        return tensors

    def _check(self, ids: np.ndarray, first: int) -> None:
        """An id past the embedding's rows reads foreign memory or stops a GPU with no word of the cause."""
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(
                f"token id {wrong} in samples {first} to {first + self._micro_batch_size - 1} is not in the "
                f"model's vocabulary of {self._vocab_size} tokens; give the tokenizer that made the data "
                "with --tokenizer-model, or a larger --vocab-size"
            )
