"""Generating text from a checkpoint."""

from megatron_core.inference.generate import Generator, until_stop
from megatron_core.inference.sampling import Sampling

__all__ = ["Generator", "Sampling", "until_stop"]
