"""Import of Megatron-LM's checkpoints."""

from megatron_core.models.megatron_lm.arguments import settings_of_arguments
from megatron_core.models.megatron_lm.reader import MegatronReader
