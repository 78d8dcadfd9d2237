"""One round of a data set, for evaluations that read all of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_core.datasets.base import Dataset, sources_of
from megatron_core.errors import ConfigError


class WholeRound:
    """The samples of ``own`` once; after the last one, samples without counted tokens fill the last batch.

    Errors: ``ConfigError`` for a blend, and for a data set without an end.
    """

    def __init__(self, own: Dataset) -> None:
        count = None if sources_of(own) else getattr(own, "samples_per_epoch", None)
        if count is None:
            raise ConfigError(
                f"full_validation=True needs one file with an end for each set, not a {type(own).__name__}; add "
                "--multiple-validation-sets, or remove it and give --eval-iters"
            )
        self._own, self._count, self.sequence_length = own, int(count), own.sequence_length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        sample = self._own[index % self._count]
        return sample if index < self._count else {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}
