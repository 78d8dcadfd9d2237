"""Common parts of the tests of all operations: tensors, bounds, and conditions that must not affect results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from megatron_core.parallel import poison
from tests.ops import libraries
from tests.sample import WHOLE_MATRIX

R = TypeVar("R")

ANY = settings(
    max_examples=50 if WHOLE_MATRIX else 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""For tests with random shapes, drawn by hypothesis."""

# Relative error of one rounding to each type, with tolerance for a sum in float32.
BOUND = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
LOW = [torch.float32, torch.bfloat16, torch.float16]

KERNELS = ["cpu", "cuda on the host", *(["cuda"] if torch.cuda.is_available() else [])]
AS_BUILT = pytest.mark.parametrize("kernels", [name for name in KERNELS if name != "cuda on the host"], indirect=True)
"""For tests of torch's view of an operator, which do not depend on the kernels on the CPU."""


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float, slack: float = 0.0) -> None:
    """Corresponding tensors are close, by the norm of the difference."""
    for mine, right in zip(found, expected, strict=True):
        assert mine.shape == right.shape
        assert (mine.double() - right).norm() <= bound * right.norm() + slack


def views(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the values of ``x`` ``[4, 6, 32]``, none of them contiguous."""
    yield "transposed", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "columns of a wider one", torch.cat([x, x], -1)[..., :32]
    yield "columns that begin off 16 bytes", torch.cat([x[..., :1], x, x[..., :3]], -1)[..., 1:33]
    yield "every second column", x.repeat_interleave(2, -1)[..., ::2]
    yield "every second row", x.repeat_interleave(2, 1)[:, ::2]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory is NaN inside, so that unwritten elements are detected."""
    poison.turn_on()
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def with_threads(work: Callable[[], R]) -> list[R]:
    """The results of ``work`` with one and with more threads."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(work())
    finally:
        torch.set_num_threads(before)
    return found


def in_both_orders(work: Callable[[], R], monkeypatch: pytest.MonkeyPatch) -> tuple[R, R]:
    """The results of ``work`` with the CUDA kernels on the CPU, with the threads of a block in ascending and in
    descending order: they differ if a barrier is missing."""
    libraries.use(libraries.host_cuda, monkeypatch)
    library = libraries.compiled(*libraries.HOST_CUDA)
    try:
        first = work()
        library.megatron_last_thread_first(1)
        return first, work()
    finally:
        library.megatron_last_thread_first(0)
