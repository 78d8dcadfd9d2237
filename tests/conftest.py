"""What every test starts from, and which tests ``make test-fast`` runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_core import parallel_state

# ``fast``: tests in modules that start no process, outside these folders, whose tests are many or long; and one row of
# the parity matrix.
LONG_FOLDERS = {"defects", "end_to_end", "examples", "ops", "parity", "preprocess", "tools", "verify"}
PROCESS_STARTERS = {"run_ranks", "subprocess", "multiprocessing"}
PARITY_SAMPLE = "test_layout_computes_what_one_process_computes[dp2 tp2 sp, overlap]"


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark the fast tests."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        starts_none = not PROCESS_STARTERS & vars(item.module).keys()
        short = starts_none and folder not in LONG_FOLDERS and "memory" not in item.name  # those make large files
        if short or item.name == PARITY_SAMPLE:
            item.add_marker("fast")


@pytest.fixture(autouse=True)
def no_layout_is_left_behind() -> Iterator[None]:
    """A run in this process makes its layout current; the next test must not find it."""
    yield
    parallel_state.destroy_model_parallel()
