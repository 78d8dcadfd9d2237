"""Megatron-LM's data sets before ``megatron.core``, which are not supported."""

from megatron.core.unsupported import unsupported

build_train_valid_test_datasets = unsupported(
    "megatron.legacy.data is not supported; use megatron.core.datasets.blended_megatron_dataset_builder"
)
