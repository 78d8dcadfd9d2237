"""Checkpoints of Megatron-LM, read as checkpoints of ours."""

from megatron_core.models.megatron_lm.reader import MegatronReader
from megatron_core.models.megatron_lm.settings import settings_of_arguments
