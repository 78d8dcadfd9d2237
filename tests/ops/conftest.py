"""The kernels with which every operation is tested, and the selected combinations of parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_core.verify.comparison import pairwise
from tests.ops import libraries
from tests.ops.checks import KERNELS
from tests.sample import WHOLE_MATRIX


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep combinations of a test's parameters in which every pair of values occurs; with WHOLE_MATRIX=1 keep all of
    them."""
    if WHOLE_MATRIX:
        return
    tests: dict[str, list[pytest.Item]] = {}
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(folder) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for name, own in tests.items():
        kept = pairwise([{key: repr(value) for key, value in item.callspec.params.items()} for item in own], name)
        dropped.update(item for i, item in enumerate(own) if i not in kept)
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes ``backend="native"`` use csrc/cpu, or the CUDA kernels through csrc/host_cuda; or, on a machine with a GPU,
    creates new tensors there, and uses the CUDA kernels there."""
    if request.param != "cuda":
        libraries.use(libraries.cpu if request.param == "cpu" else libraries.host_cuda, monkeypatch)
    with torch.device("cuda") if request.param == "cuda" else nullcontext():
        yield request.param


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``backend="native"`` use csrc/cpu, which also has float64."""
    libraries.use(libraries.cpu, monkeypatch)
