"""Transformer Engine's names at their path before release 0.10."""

from megatron.core.extensions.transformer_engine import *  # noqa: F403
