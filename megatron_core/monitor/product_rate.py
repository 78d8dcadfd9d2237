"""The rate at which this rank multiplies matrices, against which utilisation is measured."""

import time
from dataclasses import dataclass
from typing import Any

import torch

MEASURED = "measured at the start from iteration "
"""What the source of a measured rate begins with."""


@dataclass(frozen=True)
class ReferenceRate:
    """The rate that utilisation is given against; a run stores it, and its restarts use it again.

    flops: FLOP/s of a rank. device: its name, and how many ranks measured together. source: where the rate is from.
    """

    flops: float
    device: str
    dtype: str
    source: str

    @classmethod
    def of(cls, record: Any) -> "ReferenceRate | None":
        """The inverse of ``asdict``; None for anything else, as in the records of earlier releases."""
        try:
            found = cls(**record)
        except TypeError:
            return None
        texts = (found.device, found.dtype, found.source)
        is_whole = isinstance(found.flops, float) and found.flops > 0 and all(isinstance(text, str) for text in texts)
        return found if is_whole else None

    @property
    def is_measured(self) -> bool:
        """Whether the rate is not one that was given."""
        return self.source.startswith(MEASURED)

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.3g} TFLOP/s of a rank in {self.dtype} ({self.device}), {self.source}"


def measure_product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.03) -> float:
    """FLOP/s of the fastest of several products of square matrices, at least two, within ``seconds``.

    Side 8192 on a GPU, 512 on a CPU. All ranks of a job measure together: those who share cores share them
    here, too.
    """
    side = 8192 if device.type == "cuda" else 512
    a = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)  # libraries load and choose their kernels
    fastest, end = float("inf"), time.perf_counter() + seconds
    while fastest == float("inf") or time.perf_counter() < end:
        _wait(device)
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        _wait(device)
        fastest = min(fastest, time.perf_counter() - began)
    return 2.0 * side**3 / fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
