"""Import of Megatron-LM's checkpoints."""

from megatron_core.hub.megatron_lm.arguments import settings_of_arguments
from megatron_core.hub.megatron_lm.reader import MegatronReader
