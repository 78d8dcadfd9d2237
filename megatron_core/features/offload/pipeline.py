"""Updates of shards whose state or weights are in host memory or on disk, in a pipeline with their transfers.

Source: Ren et al. 2021 (ZeRO-Offload), section 4. Gradients are copied to the host when they are final, during the
backward pass. While one part of the shards is updated, the next one is read, and the previous one is written and its
new weights are copied to the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.config import OptimizerConfig, ParallelConfig, RunConfig
from megatron_core.data_parallel import Bucket
from megatron_core.data_parallel.memory import BucketMemory, Placement, TransferHandle
from megatron_core.features.offload.placement import DiskPlacement, HostPlacement
from megatron_core.features.offload.transfer import empty_on_host, lane
from megatron_core.optimizer.rule import ShardSlice
from megatron_core.optimizer.shard import Shard, ShardUpdates, UpdateJob
from megatron_core.parallel.pinned import pinned_like


@dataclass(frozen=True)
class _Sent:
    """A gradient in host memory."""

    version: int
    """Version of the gradient on the device: a gradient that changes later is sent again."""
    memory: Tensor
    transfer: TransferHandle


class UpdatePipeline(ShardUpdates):
    """Sends gradients to the host, and updates shards there."""

    def __init__(self) -> None:
        self._sent: dict[Shard, _Sent] = {}
        self._memory: dict[Shard, Tensor] = {}

    def send(self, shard: Shard) -> None:
        """Start to copy the gradient of ``shard`` to the host unless it has been sent in this step."""
        grad = shard.bucket.grad_shard
        earlier = self._sent.get(shard)
        if earlier is None or earlier.version != grad._version:
            if shard not in self._memory:
                # Lives as long as the run, so that it is allocated in whole pages.
                self._memory[shard] = pinned_like(grad) if grad.is_cuda else torch.empty_like(grad, device="cpu")
            transfer = lane("host copy_out", grad.device).copy(self._memory[shard], grad, for_host=True)
            self._sent[shard] = _Sent(grad._version, self._memory[shard], transfer)

    def settle(self) -> None:
        """Wait for all gradients in transfer, and discard them: their step is skipped, or they change."""
        for sent in self._sent.values():
            sent.transfer.wait()
        self._sent.clear()

    def run(self, jobs: Sequence[UpdateJob], update: Callable[[UpdateJob, ShardSlice], None]) -> None:
        """Call ``update`` for each job, with the tensors of its slice on one device, and write the results.

        At most three slices of shards on disk are in memory.
        """
        shards = list(dict.fromkeys(job.shard for job in jobs))
        for shard in shards:
            if shard.sends_gradient:
                self.send(shard)
        ahead: _Loaded | None = None
        behind: list[TransferHandle] = []
        spare = [_Spare() for _ in range(3)]
        for number, (job, following) in enumerate(zip_longest(jobs, jobs[1:])):
            loaded = ahead or _Loaded(job, self._sent, spare[number % 3])
            ahead = None if following is None else _Loaded(following, self._sent, spare[(number + 1) % 3])
            loaded.wait()
            update(job, loaded.part)
            _wait(behind)
            behind = loaded.store()
        _wait(behind)
        self._sent.clear()
        for shard in shards:  # what checkpoints have mapped
            for placement in (shard.placement, shard.bucket.placement):
                placement.evict()


_Spare = dict[str, Tensor]
"""Memory for parts on disk that an earlier job has used, by the name of its tensor."""


class _Loaded:
    """The tensors of a job, on the device of the shard's state and in memory after ``wait``."""

    def __init__(self, job: UpdateJob, sent: dict[Shard, _Sent], spare: _Spare) -> None:
        self._shard = job.shard
        self._at = job.span
        self._spare = spare
        shard = job.shard
        span = job.span
        self._waits = list[TransferHandle]()
        weights = shard.bucket.weight_shard[span]
        # The gradient.
        grad = shard.bucket.grad_shard
        if shard.sends_gradient:
            grad = sent[shard].memory
            self._waits.append(sent[shard].transfer)
        # The main weights; if they have the dtype of weights on another device, these may have been changed.
        if shard.is_on_other_device and not shard.is_narrow:
            main = self._memory("main", shard.main_placement, shard.main[span])
            self._waits.append(_copy(main, weights, to_host=shard.placement.is_offloaded))
        else:
            main = self._fetched("main", shard.main_placement, shard.main[span])
        # The 16-bit weights, and the moments.
        copy = None
        if shard.is_narrow and shard.is_on_other_device:
            on_host = shard.placement.is_offloaded
            copy = empty_on_host(weights) if on_host else torch.empty_like(weights, device=main.device)
        elif shard.is_narrow:
            copy = self._memory("copy", shard.bucket.placement, weights)
        state = {name: self._fetched(name, shard.placement, tensor[span]) for name, tensor in shard.state.items()}
        self.part = ShardSlice(grad[span], main, copy, state)

    def _memory(self, name: str, placement: Placement, stored: Tensor) -> Tensor:
        """Return memory for a stored part, the part itself unless it is on disk."""
        memory = placement.memory_for(stored, self._spare.get(name))
        if memory is not stored and memory.numel() >= self._spare.get(name, memory).numel():
            self._spare[name] = memory
        return memory

    def _fetched(self, name: str, placement: Placement, stored: Tensor) -> Tensor:
        """Start to read a stored part into memory."""
        memory = self._memory(name, placement, stored)
        self._waits.append(placement.read(stored, memory))
        return memory

    def wait(self) -> None:
        """Wait for all tensors."""
        _wait(self._waits)

    def store(self) -> list[TransferHandle]:
        """Start to write the tensors that the update has changed."""
        shard = self._shard
        span = self._at
        piece = self.part
        transfers = [shard.main_placement.store(shard.main[span], piece.main)]
        transfers += [shard.placement.store(shard.state[name][span], values) for name, values in piece.state.items()]
        weights = shard.bucket.weight_shard[span]
        if shard.is_on_other_device:
            updated = piece.main if piece.copy is None else piece.copy
            transfers.append(_copy(weights, updated, to_host=not shard.placement.is_offloaded))
        elif piece.copy is not None:
            transfers.append(shard.bucket.placement.store(weights, piece.copy))
        return transfers


def _copy(to: Tensor, source: Tensor, *, to_host: bool) -> TransferHandle:
    """Start a copy between the device and the host."""
    if to_host:
        return lane("host copy_out", source.device).copy(to, source, for_host=True)
    return lane("host copy_in", to.device).copy(to, source)


def _wait(transfers: Sequence[TransferHandle]) -> None:
    for transfer in transfers:
        transfer.wait()


class OffloadedMemory(BucketMemory):
    """Memory of buckets with weight shards of stage 3, or optimizer state, in host memory or on disk."""

    updates = UpdatePipeline

    def __init__(
        self, memory: BucketMemory, optimizer: OptimizerConfig, rank: int, parallel: ParallelConfig | None = None
    ) -> None:
        """``memory``: the memory of the device; ``parallel``: the settings of weights, which are offloaded with it."""
        super().__init__(memory.device, memory.initialise)
        self._optimizer = optimizer
        self._parallel = parallel
        self._rank = rank

    def placement_of(self, weights: Tensor) -> Placement:
        """The placement of this rank's shard of a bucket's ``weights`` at stage 3."""
        if self._parallel is None or not self._parallel.offloads_weights or weights.is_meta:
            return super().placement_of(weights)
        folder = self._parallel.zero3_param_offload_dir
        if folder is None:
            return HostPlacement(weights.device)
        return DiskPlacement(Path(folder), self._rank, "zero3_param_offload_dir")

    def state_placements(self, buckets: Sequence[Bucket]) -> Iterator[Placement]:
        """Yield the placement of each bucket's state; the first are offloaded, up to the configured fraction."""
        config = self._optimizer
        total = sum(bucket.weight_shard.numel() for bucket in buckets)
        wanted = config.optimizer_offload_fraction * total if config.offloads_optimizer else 0
        offloaded = 0
        for bucket in buckets:
            if offloaded >= wanted:
                yield Placement(bucket.weights.device)
                continue
            offloaded += bucket.weight_shard.numel()
            if config.optimizer_offload_dir is not None and not bucket.weights.is_meta:
                yield DiskPlacement(Path(config.optimizer_offload_dir), self._rank, "optimizer_offload_dir")
            else:
                yield HostPlacement(bucket.weights.device)


def offloaded_memory(memory: BucketMemory, config: RunConfig, rank: int) -> BucketMemory:
    """Return the memory of a run with offloaded weights or optimizer state; see ``Feature.memory``."""
    return OffloadedMemory(memory, config.optimizer, rank, config.parallel)
