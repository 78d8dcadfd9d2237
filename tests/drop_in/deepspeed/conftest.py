"""Clean-up after tests that call ``deepspeed.initialize`` in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_group_is_left_behind() -> Iterator[None]:
    """``init_distributed`` of one process makes a process group; destroy it for the next test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
