"""The optimizer's state for a shard of a bucket, and update rules for all shards of a rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.config import OptimizerConfig
from megatron_core.config.optimizers import OptimizerKind
from megatron_core.data_parallel import Bucket
from megatron_core.data_parallel.memory import Placement
from megatron_core.feature import load_hook
from megatron_core.optimizer.rule import Algorithm, Rates, ShardSlice

CHUNK = 2**20
"""Number of elements of state in bfloat16 that are converted to float32 at a time."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The optimizer's state for this rank's shard of a bucket: flat tensors of the shard's length."""

    bucket: Bucket
    kind: OptimizerKind
    algorithm: Algorithm
    placement: Placement
    main: Tensor
    """Main weights: the bucket's own tensor if it has the main dtype (and the state's device), else a copy."""
    state: dict[str, Tensor]
    """The moments by name, initially zero."""

    @classmethod
    def of(
        cls,
        bucket: Bucket,
        row: OptimizerKind,
        algorithm: Algorithm,
        placement: Placement,
        config: OptimizerConfig,
    ) -> "Shard":
        """Construct the shard from the bucket's weights."""
        main = bucket.weight_shard
        has_copy = "main_params_dtype" not in config.bf16_settings
        wide = torch.promote_types(main.dtype, torch.float32) if has_copy else main.dtype
        # Wide weights on the device are their own main weights: no second copy.
        if main.dtype != wide or (main.device != placement.device and not main.is_meta):
            main = placement.tensor("main", main.numel(), wide).copy_(main)
        wide = torch.promote_types(main.dtype, torch.float32)
        state = {
            moment.name: placement.tensor(moment.name, main.numel(), torch.bfloat16 if moment.is_bf16(config) else wide)
            for moment in row.moments(config)
        }
        return cls(bucket, row, algorithm, placement, main, state)

    @property
    def is_narrow(self) -> bool:
        """Whether the model's weights are 16-bit copies of ``main``."""
        return self.main.dtype != self.bucket.weights.dtype

    @property
    def is_on_other_device(self) -> bool:
        """Whether the state is on another device than the shard of the weights."""
        return self.main.device != self.bucket.weight_shard.device

    @property
    def sends_gradient(self) -> bool:
        """Whether the update reads the gradient on another device; joint rules run on the device."""
        return self.main.device != self.bucket.grads.device and not isinstance(self.algorithm, JointAlgorithm)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of main weights separate from the model's weights."""
        return sum(tensor.nbytes for tensor in (*self.state.values(), *([self.main] if self.is_narrow else ())))

    @property
    def is_rounded(self) -> bool:
        """Whether main weights or state are stored in bfloat16."""
        return any(tensor.dtype == torch.bfloat16 for tensor in (self.main, *self.state.values()))

    def chunks(self, run: slice) -> Iterator[slice]:
        """Yield the slices in which ``run`` is updated."""
        for chunk in self.placement.chunks(self.main.numel()):
            begin = max(chunk.start, run.start)
            stop = min(chunk.stop, run.stop)
            # bfloat16 state is converted a chunk at a time, so that float32 copies stay small.
            step = CHUNK if self.is_rounded else max(stop - begin, 1)
            for start in range(begin, stop, step):
                yield slice(start, min(start + step, stop))

    @property
    def needs_transfer(self) -> bool:
        """Whether the state is on disk, or the weights are on disk or in host memory."""
        return self.placement.is_mapped or self.bucket.placement.is_offloaded

    @property
    def is_updated_in_place(self) -> bool:
        """Whether the shard is updated on the device of its weights, together with others, in place."""
        return not (self.is_on_other_device or self.needs_transfer or self.is_rounded)

    @property
    def main_placement(self) -> Placement:
        """The placement of ``main``."""
        is_own = self.main.data_ptr() == self.bucket.weight_shard.data_ptr()
        return self.bucket.placement if is_own else self.placement

    @property
    def whole(self) -> ShardSlice:
        """The whole shard as a slice, with its gradient on the device of the weights."""
        return self.part(slice(0, self.main.numel()))

    def part(self, span: slice) -> ShardSlice:
        """Return the slice ``span``, with its gradient on the device of the weights."""
        # An update on another device cannot write these weights; ``ShardUpdates`` transfers them.
        copy = self.bucket.weight_shard[span] if self.is_narrow and not self.is_on_other_device else None
        state = {name: tensor[span] for name, tensor in self.state.items()}
        return ShardSlice(self.bucket.grad_shard[span], self.main[span], copy, state)

    def update(
        self, span: slice, piece: ShardSlice, rates: Rates, seed: int, update: Callable[[ShardSlice], None]
    ) -> None:
        """Apply ``update`` to the tensors ``piece`` of the slice ``span``; ``seed``: seed of stochastic rounding."""
        if self.is_rounded:
            load_hook(self.algorithm.config.rounded_update)(self.bucket, span, piece, rates, seed, update)
        else:
            update(piece)


@dataclass(frozen=True)
class UpdateJob:
    """The update of a slice of a shard."""

    shard: Shard
    span: slice
    rates: Rates


class ShardUpdates:
    """Updates shards one after the other, where they are; derived classes also transfer their tensors."""

    def send(self, shard: Shard) -> None:
        """Start to send the gradient of ``shard`` to the device of its state; it is final."""

    def settle(self) -> None:
        """Wait for all gradients in transfer, and discard them: their step is skipped, or they change."""

    def run(self, jobs: Sequence[UpdateJob], update: Callable[[UpdateJob, ShardSlice], None]) -> None:
        """Call ``update`` for each job with the tensors of its slice."""
        for job in jobs:
            update(job, job.shard.part(job.span))


class JointAlgorithm(Algorithm):
    """An update rule that updates all its shards, of hidden matrices, together, with messages between ranks."""

    def attach(self, shards: Sequence[Shard], seed: int) -> None:
        """Receive this rank's shards with this rule, before the first step. ``seed``: seed of stochastic rounding."""
        raise NotImplementedError

    def update_shards(self, rates: Mapping[Bucket, Rates], meanwhile: Callable[[], None]) -> None:
        """Update all shards, each with the rates of its bucket; call ``meanwhile`` during the first messages.

        A collective call of all ranks of the pipeline stage.
        """
        raise NotImplementedError

    def joint_state(self) -> Iterator[TensorBox]:
        """Yield state that no other rank has, as boxes of global tensors ``KIND.NAME``."""
        raise NotImplementedError
