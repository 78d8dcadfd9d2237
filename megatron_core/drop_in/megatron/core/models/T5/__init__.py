"""T5, which is not supported."""

from megatron.core.models.T5.t5_model import T5Model
