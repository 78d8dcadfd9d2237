"""The rate at which this rank multiplies matrices, against which utilisation is measured."""

import time

import torch


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
