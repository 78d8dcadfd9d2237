"""Kinds of lossy sums of gradients: the values of ``grad_compression`` that features implement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_core.config.parallel import ParallelConfig
from megatron_core.feature import features

UNCOMPRESSED = "none", "bf16"
"""Values of ``grad_compression`` without a compressor; bf16 rounds the gradients that are sent."""


@dataclass(frozen=True, kw_only=True)
class CompressionKind:
    """A row of ``Feature.compressions``."""

    name: str
    """The value of --grad-compression."""
    build: str
    """Hook: a function from the ``RunConfig`` to the ``data_parallel.compressor.Compressor``."""
    bytes_per_parameter: Callable[[int, int, int], float]
    """Bytes of compressed gradients at the end of a backward, from the bytes of a gradient, the number of data-parallel
    ranks and the ZeRO stage."""
    optimizer: str | None = None
    """The optimizer that is a part of the compression; None: any."""
    added_moments: int = 0
    """Number of moments in addition to those of the optimizer."""
    has_bias_correction: bool = True
    """Whether its optimizer corrects the bias of the moments if the settings request it."""
    is_local: bool = False
    """Whether the weights of data-parallel ranks differ between synchronizations."""
    updates_outside_of_steps: bool = False
    """Whether weights depend on more than the update of a step, so that code after the update must not change them."""


def compression_kinds() -> dict[str, CompressionKind]:
    """All kinds by name."""
    return {row.name: row for feature in features() for row in feature.compressions}


def compression_of(parallel: ParallelConfig) -> CompressionKind | None:
    """The kind that ``grad_compression`` names; None if gradients are summed without a compressor."""
    return compression_kinds().get(parallel.grad_compression)


def added_moments(parallel: ParallelConfig) -> int:
    """Number of moments that gradient compression adds to those of the optimizer."""
    compression = compression_of(parallel)
    return 0 if compression is None else compression.added_moments
