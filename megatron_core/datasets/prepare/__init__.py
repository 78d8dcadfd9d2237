"""From text files to token files, in parts that worker processes make and one process joins."""

from megatron_core.datasets.prepare.documents import Limits
from megatron_core.datasets.prepare.inputs import find_inputs
from megatron_core.datasets.prepare.job import prepare
from megatron_core.datasets.prepare.readers import read_texts
from megatron_core.datasets.prepare.settings import PrepareSettings

__all__ = ["Limits", "PrepareSettings", "find_inputs", "prepare", "read_texts"]
