"""Setup, steps and the loop of a training run."""

from megatron_core.training.callbacks import Callback
from megatron_core.training.pretrain import pretrain, read_settings
