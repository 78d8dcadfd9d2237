"""Poison for buffers: what has not arrived yet or is outdated is NaN, so that a read that comes too early shows.

torch's own deterministic mode fills new memory (``torch.empty`` and its kin) with NaN, integers with their largest
value. Long-lived buffers get the same here, as soon as their values are outdated. The switch is torch's own.
"""

import torch
from torch import Tensor


def turn_on() -> None:
    """Poison from now on, in the whole process; operations without a deterministic form warn and run all the same."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def is_on() -> bool:
    """Whether new memory is poisoned."""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def poison_outside(flat: Tensor, own: slice) -> None:
    """With poison on, fill ``flat`` [n] with NaN but for its part ``own``."""
    if is_on():
        flat[: own.start].fill_(torch.nan)
        flat[own.stop :].fill_(torch.nan)
