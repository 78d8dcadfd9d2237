"""The device of this process."""

from deepspeed.accelerator.real_accelerator import get_accelerator as get_accelerator
from deepspeed.accelerator.real_accelerator import is_current_accelerator_supported as is_current_accelerator_supported
