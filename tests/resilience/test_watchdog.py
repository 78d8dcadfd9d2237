"""A program that ends by itself is not aborted by the thread that watches its ranks."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time
import torch.distributed as dist
from megatron_core.resilience import watchdog

watchdog.POLL = 1e-5
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for _ in range(8):
    watchdog.Watchdog(store, 0, 1, 100.0, 3)
time.sleep(0.3)
"""


def test_a_program_ends_while_the_store_is_polled() -> None:
    """A thread in a call of torch aborts Python at its end."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
