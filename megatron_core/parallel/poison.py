"""Debug mode that fills uninitialized and outdated buffers with NaN, so that a read before the data arrives is visible.

torch's deterministic mode fills new memory (``torch.empty`` and similar) with NaN, integers with their maximum. This
module does the same to long-lived buffers as soon as their values are outdated. The switch is torch's own.
"""

import torch
from torch import Tensor


def turn_on() -> None:
    """Turn poisoning on for the whole process; operations without a deterministic form warn and run anyway."""
    # torch fills new memory only in this mode; a warning instead of an error, because the aim is poison and not
    # determinism.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def is_on() -> bool:
    """Whether new memory is poisoned."""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def poison_outside(flat: Tensor, valid: slice) -> None:
    """If poisoning is on, fill ``flat`` [n] with NaN outside the slice ``valid``."""
    if is_on():
        flat[: valid.start].fill_(torch.nan)
        flat[valid.stop :].fill_(torch.nan)
