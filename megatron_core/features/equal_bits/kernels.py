"""Comparison of the ranks' kernels before ``--layout-invariant`` relies on them."""

import torch

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.equal_bits.fixed_products import describe_products
from megatron_core.parallel.texts import gather_from_all_ranks, listed


def check_same_kernels(config: RunConfig, device: torch.device) -> None:
    """Compare how the ranks of the job compute products in a fixed order; a collective call.

    Errors: ``ConfigError`` on all ranks, with the kernels and their ranks, if they differ. Each process chooses its
    kernels alone: a processor may have no AMX, or the system may refuse it to one process.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, kernels in enumerate(gather_from_all_ranks(describe_products(device.type), device)):
        ranks_of.setdefault(kernels, []).append(rank)
    if len(ranks_of) > 1:
        by_kernel = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {kernels}" for kernels, ranks in ranks_of.items()
        )
        raise ConfigError(
            f"layout_invariant=True needs the same kernels for products on all ranks, but they are: {by_kernel}. Use "
            "one kind of processor with the same installation on all nodes (megatron-doctor --verbose shows a node's "
            "kernels), or remove --layout-invariant"
        )
