"""The data sets of a run in Megatron-LM's order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_core.checkpoint.reader import note
from megatron_core.config import RunConfig
from megatron_core.datasets.base import Dataset
from megatron_core.datasets.build import Share, Splits, build_datasets
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.errors import DataError
from megatron_core.features.megatron_order.build import build_megatron_order
from megatron_core.features.megatron_order.mock import build_mock_order
from megatron_core.features.megatron_order.order import samples_wanted
from megatron_core.features.megatron_order.settings import MegatronOrderConfig
from megatron_core.training.data import DataPart, DataRequest


class OrderedData(DataPart):
    """Builds token files or Megatron-LM's mock data in Megatron-LM's order."""

    def build(self, request: DataRequest) -> Splits:
        """See ``DataPart.build``."""
        config = request.config
        data = config.data
        seed = config.training.seed
        num_samples = wanted_samples(config, request.data_parallel_size)
        if not data.mock_data:
            order = MegatronOrder(config, num_samples)
            return build_datasets(data, seed=seed, tokenizer=request.tokenizer, order=order)
        tokenizer = request.tokenizer
        vocab_size = request.vocab_size if tokenizer is None else tokenizer.vocab_size
        eod = None if tokenizer is None else tokenizer.eod
        if eod is None:
            eod = vocab_size - 1  # as of NullTokenizer
        train, valid, test = build_mock_order(
            vocab_size,
            eod,
            num_samples,
            data.seq_length,
            seed,
            cache=config.section(MegatronOrderConfig).data_cache_path,
            masked_token=eod if data.eod_mask_loss else None,
        )
        return Splits(train, valid, test)


@dataclass(frozen=True)
class MegatronOrder:
    """Megatron-LM's order of the samples of weighted files, a ``BlendOrder``."""

    config: RunConfig
    num_samples: Mapping[str, int]
    """Number of samples that the run needs, by split; one epoch of a split that is absent."""

    def __call__(
        self, shares: Sequence[Share], weights: Sequence[float] | None, split_name: str, masked_token: int | None
    ) -> Dataset:
        """The samples of a split as one data set; DataError for too few tokens."""
        data = self.config.data
        for file, _ in shares:
            if not isinstance(file, IndexedDataset):
                raise DataError(
                    f"{file.path_prefix} is a list of parts, and --data-order megatron needs the index of one pair; "
                    "join the parts with megatron-merge-datasets, or use --data-order keyed"
                )
        settings = self.config.section(MegatronOrderConfig)
        is_read_once = data.full_validation and split_name != "train"
        dataset: Any = build_megatron_order(
            [file for file, _ in shares],
            [sequences for _, sequences in shares],
            weights,
            None if is_read_once else self.num_samples.get(split_name),
            data.seq_length,
            self.config.training.seed,
            split_name,
            cache=settings.data_cache_path,
            masked_token=masked_token,
            surplus=settings.mid_level_dataset_surplus,
            threads=data.num_dataset_builder_threads,
        )
        # Each evaluation reads the same samples, as many as that of the test data.
        needed = self.num_samples.get("train" if split_name == "train" else "test", 0)
        if not is_read_once and len(dataset) < needed:
            note(
                f"the {split_name} data needs {needed:,} samples, but Megatron-LM's order reads files without weights "
                f"once: the run stops with an error after {len(dataset):,}; give weights"
            )
        return dataset


def wanted_samples(config: RunConfig, data_parallel_size: int) -> dict[str, int]:
    """Number of samples that Megatron-LM requests of each split; without ``eval_interval``, it evaluates once, at the
    end."""
    training = config.training
    iterations = training.num_iterations(data_parallel_size, config.data.seq_length)
    numbers = samples_wanted(
        global_batch_size=training.final_batch_size(data_parallel_size),
        train_iters=training.train_iters,
        train_samples=training.train_samples,
        eval_interval=training.eval_interval or iterations + 1,
        eval_iters=training.eval_iters,
        eval_batch_size=training.eval_global_batch_size,
    )
    return dict(zip(("train", "valid", "test"), numbers, strict=True))
