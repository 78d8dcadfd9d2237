"""Token files and the samples that training reads from them.

`BatchLoader` is in `megatron_core.datasets.loader` and is not imported here: it needs torch, and tools that write token
files (`megatron_core.preprocess`) should start without it.
"""

from typing import TYPE_CHECKING

from megatron_core.datasets.base import Dataset, Sample
from megatron_core.datasets.blend import BlendedDataset, parse_blend
from megatron_core.datasets.build import Splits, build_datasets
from megatron_core.datasets.header import DatasetHeader, check_tokenizer, read_header
from megatron_core.datasets.indexed import DType, IndexedDataset, get_bin_path, get_idx_path
from megatron_core.datasets.keyed_dataset import KeyedGPTDataset, KeyedPermutation, MockDataset, mix64
from megatron_core.datasets.paths import parse_split, split_ranges
from megatron_core.moved import old_names_of

if not TYPE_CHECKING:
    __getattr__ = old_names_of(__name__)
