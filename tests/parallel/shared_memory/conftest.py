"""Shared memory for these tests: the library of the build, or one that is compiled here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_core.parallel.shared_memory import host
from tests.parallel.shared_memory.compiled import compiled, in_use


@pytest.fixture(scope="session", autouse=True)
def transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Without one that was built, compile it."""
    if not host.library_path().exists():
        with in_use(compiled(tmp_path_factory.mktemp("transport"))):
            yield
    else:
        yield
