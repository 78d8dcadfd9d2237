"""Experts: names that programs import; a layer with experts is one of ``megatron_core.transformer.moe``."""

from deepspeed.moe import layer as layer
from deepspeed.moe import utils as utils
