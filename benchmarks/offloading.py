"""Offloading on CPU ranks: memory of a rank counts as a device's, and transfers may be synchronous."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from megatron_core.features.offload import activations as offload
from megatron_core.features.offload.transfer import Lane
from megatron_core.optimizer.shard import Shard
from megatron_core.parallel.handles import Done


@contextmanager
def on_a_device() -> Iterator[None]:
    """Weights, activations and gradients count as a device's, and the optimizer's state in host memory as away.

    Needs ``bf16``, because 32-bit weights on the CPU are their own main weights.
    """
    is_offloaded = property(lambda shard: shard.placement.is_offloaded)
    with (
        mock.patch.object(offload, "is_on_host", lambda tensor: False),
        mock.patch.object(Shard, "is_on_other_device", is_offloaded),
        mock.patch.object(Shard, "sends_gradient", is_offloaded),
    ):
        yield


@contextmanager
def synchronous() -> Iterator[None]:
    """Wait for each transfer of offloading when it starts: the reference without overlap."""
    start = Lane.start

    def start_and_wait(*args: Any, **settings: Any) -> Done:
        start(*args, **settings).wait()
        return Done()

    with mock.patch.object(Lane, "start", start_and_wait):
        yield
