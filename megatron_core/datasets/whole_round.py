"""One round of a data set, for evaluations that read all of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_core.datasets.base import Dataset, sources_of
from megatron_core.errors import ConfigError


class WholeRound:
    """The samples of ``dataset`` once; after the last one, samples without counted tokens fill the last batch.

    Errors: ``ConfigError`` for a blend, and for a data set without an end.
    """

    def __init__(self, dataset: Dataset) -> None:
        # A blend has no end: it draws from each file by its weight, so no number of samples has each one once.
        count = None if sources_of(dataset) else getattr(dataset, "samples_per_epoch", None)
        if count is None:
            raise ConfigError(
                f"full_validation=True needs one file with an end for each set, not a {type(dataset).__name__}; add "
                "--multiple-validation-sets, or remove it and give --eval-iters"
            )
        self.sequence_length = dataset.sequence_length
        self._dataset = dataset
        self._count = int(count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index % self._count]
        return sample if index < self._count else {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}
