"""State of a training outside of the memory of its device, while a sampler or another model needs this memory."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.data_parallel import DataParallel
from megatron_core.data_parallel.split_parameter import acquire, release
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.pinned import pinned_bytes

PARTS = ("weights", "main_weights", "moments", "gradients")
"""``main_weights``: those of 16-bit weights, in float32."""
CHUNK_BYTES = 16 * 2**20


class OffloadedState:
    """Weights and optimizer state of a training in host memory, or in a file; gradients are freed.

    The tensors and all their views stay the same objects, and get their memory and their bits back in ``restore``.
    """

    # The storage is freed and not the tensors: parameters, views of flat buffers and hooks refer to it.

    def __init__(
        self,
        data: DataParallel,
        optimizer: Optimizer,
        folder: Path | None,
        parts: Collection[str] = PARTS,
        *,
        keeps_gradients: bool = False,
        moments: Iterable[Tensor] = (),
    ) -> None:
        """``folder``: where each rank writes a file; None: host memory, for state on another device. ``parts``: those
        of ``PARTS`` to move. ``keeps_gradients``: a step is incomplete. ``moments``: further state of an optimizer.

        Errors: ``ConfigError`` without a folder if the state is in host memory.
        """
        device = data.device
        if device.type == "cpu" and folder is None:
            raise ConfigError(
                "offload() of a run on a CPU, whose state is in host memory: name a folder for it with offload(folder)"
            )
        self.parts = frozenset(parts)
        # Weights that are still sent, and checkpoints that are still copied, read the memory.
        data.finish_param_sync()
        optimizer.before_update()
        moved = [*_kept_tensors(data, optimizer, self.parts), *(moments if "moments" in self.parts else ())]
        gradients = list(_gradients(data)) if "gradients" in self.parts else []
        self._kept = _distinct([*moved, *(gradients if keeps_gradients else ())], device)
        self._gradients = _distinct(() if keeps_gradients else gradients, device)
        self._file = None if folder is None else folder / f"offloaded-{data.groups.rank}.bin"
        self._copies: list[Tensor] = []
        if self._file is None:
            self._copies = [pinned_bytes(tensor.numel()).copy_(tensor) for tensor in self._kept]
        else:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("wb") as file:
                for chunk in self._chunks():
                    # A copy, because numpy marks memory that it has seen as not resizable.
                    file.write(chunk.to("cpu", copy=True).numpy().data)
        self.nbytes = sum(tensor.nbytes for tensor in (*self._kept, *self._gradients))
        """Bytes of the device that are free."""
        for tensor in (*self._kept, *self._gradients):
            release(tensor)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # also for other processes on the device

    def restore(self) -> None:
        """Allocate the memory again and copy the state back."""
        for tensor in self._gradients:
            acquire(tensor)
            tensor.zero_()
        for tensor in self._kept:
            acquire(tensor)
        if self._file is None:
            for tensor, copy in zip(self._kept, self._copies, strict=True):
                tensor.copy_(copy)
            return
        with self._file.open("rb") as file:
            for chunk in self._chunks():
                on_host = torch.empty_like(chunk, device="cpu")
                if file.readinto(on_host.numpy().data) != chunk.nbytes:
                    raise CheckpointError(f"{self._file} is shorter than the state; load a checkpoint")
                chunk.copy_(on_host)
        self._file.unlink()

    def _chunks(self) -> Iterator[Tensor]:
        """The state in parts that can be copied without memory for all of it."""
        for tensor in self._kept:
            yield from tensor.split(CHUNK_BYTES)


def _kept_tensors(data: DataParallel, optimizer: Optimizer, names: Collection[str]) -> Iterator[Tensor]:
    """Weights and optimizer state of this rank."""
    if "weights" in names:
        for bucket in data.all_buckets:
            yield bucket.weights
            yield bucket.weight_shard
        yield from (parameter.data for _, parameter in data.frozen)
    for _, tensors in optimizer.tensors():
        yield from (t for label, t in tensors.items() if ("main_weights" if label == "main" else "moments") in names)
    if "moments" in names:
        yield from (piece.memory for piece in optimizer.joint_state())


def _gradients(data: DataParallel) -> Iterator[Tensor]:
    """Buffers of gradients, which each step sets to zero."""
    for bucket in data.buckets:
        yield bucket.grads
        yield bucket.sum_shard
        yield bucket.grad_shard


def _distinct(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """The bytes of each storage with memory on ``device``, as a flat tensor; others, such as files of offloaded state,
    remain."""
    by_address: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        is_whole = tensor.nbytes == storage.nbytes() > 0 and tensor.is_contiguous()
        if is_whole and storage.resizable() and tensor.device.type == device.type:
            by_address.setdefault(storage.data_ptr(), tensor.detach().view(-1).view(torch.uint8))
    return list(by_address.values())
