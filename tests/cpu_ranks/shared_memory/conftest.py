"""Shared memory for these tests: the installed library, or one compiled here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_core.cpu_ranks.shared_memory import host
from tests.cpu_ranks.shared_memory.compiled import compiled, in_use


@pytest.fixture(scope="session", autouse=True)
def transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile the library if none is installed."""
    if not host.shared_memory_path().exists():
        with in_use(compiled(tmp_path_factory.mktemp("transport"))):
            yield
    else:
        yield
