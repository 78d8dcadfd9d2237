"""Ulysses for transformers models, as accelerate sets it up for ``ParallelismConfig(sp_size=...)``.

DeepSpeed's loader splits sequences, and its attention joins them. Here the loader yields whole sequences, which the
engine splits; the losses are equal.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.errors import ConfigError

IGNORED = -100
"""The label without a loss."""


class SequenceRanks:
    """The ``mpu`` of a job whose neighbouring ranks split each sequence."""

    def __init__(self, size: int) -> None:
        if size < 1 or dist.get_world_size() % size:
            raise ConfigError(f"sp_size={size} must be a divisor of the {dist.get_world_size()} ranks")
        self.size = size
        self._group, _ = dist.new_subgroups(size)

    def get_sequence_parallel_group(self) -> Any:
        """Return the ranks that split the sequences of this rank."""
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        """Return their number."""
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        """Return the number of this rank among them."""
        return dist.get_rank(self._group)


class UlyssesSPAttentionHF:
    """Requests sequence parallelism; the engine chooses the attention by the model's own configuration."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: Any, core_attn_implementation: Any, sequence_parallel_size: int, **_: Any
    ) -> SequenceRanks:
        """Return the ``mpu`` for ``deepspeed.initialize``; its forwards in evaluation mode are whole on each rank."""
        return SequenceRanks(sequence_parallel_size)


class UlyssesSPDataLoaderAdapter:
    """Yields the batches of the loaders of all ranks of a sequence, whole and with shifted labels, on each of them."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.sp_group, self.sp_world_size, self.device = dl, sp_group, sp_world_size, device

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.dl:
            local = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
            batches: list[Any] = [None] * self.sp_world_size
            dist.all_gather_object(batches, local, group=self.sp_group)
            for shared in batches:
                labels = torch.nn.functional.pad(shared.pop("labels"), (0, 1), value=IGNORED)
                shared["shift_labels"] = labels[..., 1:].contiguous()
                yield {n: x.to(self.device) if isinstance(x, torch.Tensor) else x for n, x in shared.items()}
