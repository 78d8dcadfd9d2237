"""Peak memory of this process."""

from __future__ import annotations

import torch

from megatron_core.monitor.device import peak_memory_bytes


def test_the_peak_is_in_bytes_and_never_falls():
    before = peak_memory_bytes()
    assert 20 * 2**20 < before < 2**40  # a Python process with torch, so neither pages nor kibibytes
    block = torch.ones(32 * 2**20)
    del block
    assert peak_memory_bytes() >= before
