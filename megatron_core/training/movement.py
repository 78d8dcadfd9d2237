"""Parameters that do not train: no gradient reaches them, or they stay what they were."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.optimizer.optimizer import Optimizer
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.texts import gather_texts


class Movement:
    """Tells which of a run's parameters are left out; all ranks ask together and learn the names of all stages."""

    def __init__(self, data_parallel: DataParallel, optimizer: Optimizer, device: torch.device) -> None:
        self.buckets, self.groups = data_parallel.buckets, data_parallel.groups
        self.optimizer, self.device = optimizer, device
        self.names = [name for bucket in self.buckets for name in bucket.names]
        self.place_of = {p: i for i, p in enumerate(p for bucket in self.buckets for p in bucket.parameters)}

    def without_gradient(self) -> list[str]:
        """Parameters whose gradient in the last step is zero in every element, on every rank.

        Each rank looks at its shards, where sums are complete; a tied weight's is summed over both of its stages.
        """
        reached = torch.zeros(len(self.names), dtype=torch.int32, device=self.device)
        for bucket in self.buckets:
            for _, parameter, start, stop, at in bucket.pieces():
                reached[self.place_of[parameter]] = bucket.grad_shard[at : at + stop - start].any()
        return self._names_without(reached)

    def unmoved(self, named: Sequence[tuple[str, nn.Parameter]], before: Tensor, now: Tensor) -> list[str]:
        """Parameters whose hashes (``before`` and ``now``, in the order of ``named``) have changed on no rank."""
        moved = torch.zeros(len(self.names), dtype=torch.int32, device=self.device)
        changed = (before != now).tolist()
        for (_, parameter), has_changed in zip(named, changed, strict=False):  # hashes of shared rows come after
            if has_changed and parameter in self.place_of:
                moved[self.place_of[parameter]] = 1
        for parameter in self._moved_below_rounding():
            moved[self.place_of[parameter]] = 1
        return self._names_without(moved)

    def _moved_below_rounding(self) -> Iterable[nn.Parameter]:
        """16-bit weights that are still the rounded main weights, though those have moved."""
        for bucket, tensors in self.optimizer.tensors():
            if "main" in tensors:
                yield from _hidden_moves(bucket, tensors["main"])

    def _names_without(self, flags: Tensor) -> list[str]:
        """Names whose flag is 0 on all ranks that hold a part or a copy, of all pipeline stages."""
        all_reduce_(flags, self.groups.group("tp-dp-cp"), maximum=True)
        names = [name for name, flag in zip(self.names, flags.tolist(), strict=True) if not flag]
        texts = gather_texts("\n".join(names), self.groups.group("tp-cp-ep-dp-pp"), self.device)
        return list(dict.fromkeys(name for text in texts for name in text.splitlines()))


def _hidden_moves(bucket: Bucket, main: Tensor) -> Iterable[nn.Parameter]:
    for _, parameter, start, stop, at in bucket.pieces():
        wide, narrow = main[at : at + stop - start], bucket.weight_shard[at : at + stop - start]
        if torch.equal(wide.to(narrow.dtype), narrow) and not torch.equal(wide, narrow.to(wide.dtype)):
            yield parameter
