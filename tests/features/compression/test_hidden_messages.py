"""The share of compressed messages that the backward pass hides, with a slow link in place of the machine's.

Each message occupies the link for ``MESSAGE`` seconds, one after the other, and the backward of a layer takes
``LAYER`` seconds, on a simulated clock. So the share depends on the order of the calls alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.slow_link import SimulatedClock
from megatron_core.data_parallel import DataParallel, DataParallelSettings
from megatron_core.features.compression import powersgd, signs
from megatron_core.features.compression.powersgd import PowerSGD
from megatron_core.features.compression.signs import OneBitAdam, OneBitLAMB, SignSums, ZeroOneAdam, ZeroOnePolicy
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted

CLOCK = SimulatedClock()
MESSAGE, LAYER, LAYERS = 0.01, 0.024, 8
SENDS = [
    *((powersgd, "all_reduce_"), (signs, "start_all_to_all_rows")),
    (signs, "all_gather_flat_"),
]
METHODS: dict[str, Callable[[], PowerSGD | SignSums]] = {
    "powersgd": lambda: PowerSGD(1, 0),
    "onebit-adam": lambda: OneBitAdam(0.9, 0),
    "onebit-lamb": lambda: OneBitLAMB(0.9, 0),
    "zero-one-adam": lambda: ZeroOneAdam(ZeroOnePolicy(100, 1, 1, 1)),
}


class Link:
    """A link that carries one message at a time, and the seconds that this rank waits for it."""

    def __init__(self) -> None:
        self.free = self.waited = 0.0
        self.messages = 0

    def send(self, work: Any) -> Sent:
        """Send a message after the earlier ones."""
        self.messages += 1
        self.free = max(self.free, CLOCK.monotonic()) + MESSAGE
        return Sent(self, work, self.free)


class Sent:
    """The handle of a message."""

    def __init__(self, link: Link, work: Any, arrives: float) -> None:
        self.link, self.work, self.arrives = link, work, arrives

    def wait(self) -> None:
        """Wait until the message has arrived."""
        left = max(self.arrives - CLOCK.monotonic(), 0.0)
        CLOCK.sleep(left)
        self.link.waited += left
        self.work.wait()


class Slow(nn.Sequential):
    """Layers whose backward takes time."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.tanh(layer(x))
            x.register_hook(lambda _: CLOCK.sleep(LAYER))
        return x


def _hidden(method: str, stage: int, overlap: bool) -> tuple[list[float], list[np.ndarray]]:
    """The hidden share of the messages of all buckets but the last one in each step, and the sums."""
    link = Link()
    for module, name in SENDS:
        send = getattr(module, name)

        def slow(*args: Any, send: Any = send, **kwargs: Any) -> Any:
            sent = send(*args, **kwargs)
            return (sent[0], link.send(sent[1])) if isinstance(sent, tuple) else link.send(sent)

        setattr(module, name, slow)
    torch.manual_seed(0)
    model = Slow(*(nn.Linear(16, 16, bias=False) for _ in range(LAYERS)))
    compressor = METHODS[method]()
    compressor.step = 2
    groups = ParallelGroups(Grid(dp=2), dist.get_rank())
    settings = DataParallelSettings(zero_stage=stage, overlap_grad_reduce=overlap, bucket_size=1)
    data = DataParallel({0: model}, groups, settings, compressor=compressor)
    if isinstance(compressor, SignSums):
        for bucket in data.buckets:
            shard = torch.ones_like(bucket.weight_shard)
            compressor.moments[bucket] = {"exp_avg": 0.01 * shard, "exp_avg_sq": shard}
    shares = []
    for _ in range(3):
        link.waited, link.messages = 0.0, 0
        compressor.discard()
        data.zero_grad()
        data.enable_grad_sync(0)
        torch.manual_seed(1 + dist.get_rank())
        model(torch.randn(4, 16)).square().sum().backward()
        data.finish_grad_sync()
        each = link.messages / LAYERS
        hideable = (link.messages - each) * MESSAGE
        # The messages of the last bucket start when nothing is left to compute.
        late = max(link.waited - each * MESSAGE, 0.0)
        shares.append(1.0 - late / hideable)
    del shares[0]  # the first step gathers the momentum of ZeRO, once in a training
    return shares, [bucket.grad_shard.numpy() for bucket in data.buckets]


@pytest.mark.parametrize(("method", "stage"), [*((m, 0) for m in METHODS), ("onebit-adam", 2), ("powersgd", 1)])
def test_the_backward_hides_compressed_messages(method: str, stage: int) -> None:
    on, off = (run_ranks(2, _hidden, method, stage, overlap) for overlap in (True, False))
    for (hidden, sums), (blocking, expected) in zip(on, off, strict=True):
        assert min(hidden) >= 0.6, hidden
        assert max(blocking) <= 0.1, "without overlap the same measure finds nothing hidden"
        assert all(map(np.array_equal, sums, expected))


def test_buckets_that_do_not_continue_are_seen() -> None:
    with planted("data_parallel.wrapper:DataParallel._start_early", "earlier.continue_reduce()", "False"):
        assert all(max(shares) < 0.6 for shares, _ in run_ranks(2, _hidden, "onebit-adam", 0, True))
