"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_core import parallel_state


@pytest.fixture(autouse=True)
def no_layout_is_left_behind() -> Iterator[None]:
    """A run in this process makes its layout current; the next test must not find it."""
    yield
    parallel_state.destroy_model_parallel()
