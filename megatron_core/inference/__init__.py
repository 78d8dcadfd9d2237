"""Generating text from a checkpoint."""

from megatron_core.inference.engine import Engine, generate
from megatron_core.inference.generator import Generator
from megatron_core.inference.requests import Progress, Request, TokenScore
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.text import TextStream, TokenTexts, until_stop
