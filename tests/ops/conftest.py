"""The bodies that every operation is tested with."""

from __future__ import annotations

import pytest

from tests.ops import libraries


@pytest.fixture(params=["cpu", "cuda on the host"])
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes ``backend="native"`` run csrc/cpu, or the CUDA kernels through csrc/host_cuda."""
    library = libraries.cpu() if request.param == "cpu" else libraries.compiled(*libraries.HOST_CUDA)
    libraries.use(library, monkeypatch)
    return request.param


@pytest.fixture
def cpu_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``backend="native"`` run csrc/cpu, which has float64 too."""
    libraries.use(libraries.cpu(), monkeypatch)
