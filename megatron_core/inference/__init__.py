"""Generating text from a checkpoint."""

from megatron_core.inference.engine import Engine, Progress, Request, TokenScore, generate
from megatron_core.inference.generator import Generator
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.text import TextStream, until_stop
