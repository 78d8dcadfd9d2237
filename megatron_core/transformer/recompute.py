"""Activations computed again in backward, not kept (Chen et al. 2016; Korthikanti et al. 2022, section 5)."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.checkpoint import checkpoint

from megatron_core.config import ModelConfig


def recomputed(function: Callable) -> Callable:
    """``function`` with only its inputs kept for backward.

    No generator state is saved: dropout masks are functions of their coordinates, so the second pass has the same.
    """
    return lambda *args: checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_runs(config: ModelConfig, num_layers: int) -> list[tuple[range, bool]]:
    """A stage's layers as runs (local numbers, whether the run is recomputed as one).

    ``uniform``: runs of ``recompute_num_layers`` layers, all recomputed, each keeping its first input.
    ``block``: the first ``recompute_num_layers`` layers, each on its own; the others keep everything. Layers whose
    activations go to the host are runs of their own; of a run that is recomputed the input goes.
    """
    every = config.recompute_num_layers or 1
    if config.recompute_granularity != "full":
        away = min(config.cpu_offloading_num_layers, num_layers)
        return [(range(i, i + 1), False) for i in range(away)] + [(range(away, num_layers), False)]
    if config.recompute_method == "uniform":
        return [(range(i, min(i + every, num_layers)), True) for i in range(0, num_layers, every)]
    return [(range(i, i + 1), i < every) for i in range(num_layers)]
