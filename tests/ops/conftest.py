"""The bodies that every operation is tested with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.ops import libraries

BODIES = ["cpu", "cuda on the host", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes ``backend="native"`` run csrc/cpu, or the CUDA kernels through csrc/host_cuda; or, where there is a GPU,
    makes new tensors lie there, and the CUDA kernels run there."""
    if request.param != "cuda":
        libraries.use(libraries.cpu if request.param == "cpu" else libraries.host_cuda, monkeypatch)
    with torch.device("cuda") if request.param == "cuda" else nullcontext():
        yield request.param


@pytest.fixture
def cpu_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``backend="native"`` run csrc/cpu, which has float64 too."""
    libraries.use(libraries.cpu, monkeypatch)
