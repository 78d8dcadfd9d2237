"""Not available: compression of models."""

from deepspeed.unavailable import refuse

refuse("deepspeed.compression", "compress the model after training")
