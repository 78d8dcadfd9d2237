"""Checkpoints, token files and small files of runs in object storage, such as s3://bucket/folder, through fsspec."""

from typing import TYPE_CHECKING

from megatron_core.feature import Feature
from megatron_core.locations import path_of
from megatron_core.moved import old_names_of

FEATURES = (
    Feature(
        name="storage",
        is_used=lambda config: path_of(config.checkpoint.save or "") is None and not config.training.skip_train,
        urls="megatron_core.storage.paths:StoragePath",
        run_part="megatron_core.storage.run_files:FetchedFiles",
        callbacks=("megatron_core.storage.run_files:RunFiles",),
    ),
)

if not TYPE_CHECKING:
    __getattr__ = old_names_of(__name__)
