"""Parts of the engine."""

from deepspeed.runtime import utils as utils
