"""Megatron-LM's data set for fill in the middle, over the engine's."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron_core.config import RunConfig
from megatron_core.datasets.base import Sample
from megatron_core.errors import ConfigError
from megatron_core.features.fill_in_the_middle.dataset import FIMDataset


@dataclass
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Settings of ``GPTFIMDataset``, see ``FIMDataset``. Raises ConfigError if rates or tokens are missing."""

    fim_rate: float | None = None
    """Probability that a document is rearranged. Required."""
    fim_spm_rate: float | None = None
    """Probability that the suffix comes first. Required."""
    fim_extra_tokens: dict[str, Any] | None = None
    """The tokens `prefix`, `middle`, `suffix`, `pad`, and `eod` if it differs from the tokenizer's. Required."""
    fim_split_sample: str | None = None
    """The token between the fragments of a document."""
    fim_fragment_rate: float | None = None
    """Probability that a fragment is rearranged. Required with `fim_split_sample`."""
    fim_no_prefix: str | None = None
    """Documents that begin with this text are not rearranged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = ["fim_rate", "fim_spm_rate", "fim_extra_tokens"]
        needed += ["fim_fragment_rate"] if self.fim_split_sample is not None else []
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ConfigError(f"GPTFIMDatasetConfig needs {', '.join(missing)}")

    def engine_config(self) -> RunConfig:
        """Return the engine's settings."""
        names = ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix")
        values = {name: getattr(self, name) for name in names}
        values |= {f"fim_{name}_token": token for name, token in (self.fim_extra_tokens or {}).items()}
        return RunConfig.from_flat(
            {"fim_data": True, "eod_mask_loss": bool(self.eod_mask_loss), "seed": self.random_seed, **values}
        )


class GPTFIMDataset(GPTDataset):
    """``GPTDataset`` with documents rearranged for fill in the middle, by the random choices of ``FIMDataset``."""

    config: GPTFIMDatasetConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = _Given(self.config.sequence_length)
        config = self.config
        self._fim = FIMDataset(self._given, config.tokenizer, config.engine_config())

    def _rearrange(
        self, idx: int, text: np.ndarray, sample: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self._given.sample = Sample(tokens=sample["tokens"], labels=sample["labels"], loss_mask=sample["loss_mask"])
        found = self._fim[idx]
        if found is self._given.sample:
            return text, sample
        arrays = {name: np.asarray(found[name]) for name in ("tokens", "labels", "loss_mask")}
        return arrays["tokens"], sample | arrays


class _Given:
    """A data set of one sample: the next to be rearranged."""

    sample: Sample

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length

    def __getitem__(self, index: int) -> Sample:
        return self.sample

    def source_of(self, index: int) -> int:
        """Return 0: there is one source."""
        return 0
