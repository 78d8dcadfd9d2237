"""Update matrices that are split over ranks: one rank transforms each matrix and sends the parts of the result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from megatron_core.checkpoint import Box, TensorBox
from megatron_core.data_parallel import Bucket
from megatron_core.features.matrix_optimizers.plan import Item, MatrixMessages, MatrixTask, Round, plan_rounds
from megatron_core.optimizer.rule import Rates, ShardSlice, write_copy
from megatron_core.optimizer.shard import JointAlgorithm, Shard
from megatron_core.parallel.collectives import start_all_to_all_rows
from megatron_core.parallel.handles import Done, Handle
from megatron_core.parallel.sharding import Fused

Arriving = tuple[Tensor, Handle]


class MatrixAlgorithm(JointAlgorithm):
    """An update rule for whole hidden matrices.

    Each step: every rank computes the ``direction`` of its shards, element by element; the parts of each matrix are
    sent to its owner; the owner calls ``transform`` on the whole matrix; the parts of the result are sent back, and
    every rank updates its shards with ``apply``. The messages of a round are in flight while the ranks transform the
    matrices of another round.
    """

    def direction(self, piece: ShardSlice, rates: Rates) -> Tensor:
        """Update the state of ``piece``, without its weights, and return the flat direction of its matrices.

        The result may be a tensor of the state.
        """
        raise NotImplementedError

    def new_state(self, matrix: Tensor, fused: Fused | None) -> dict[str, Tensor]:
        """Return the initial state that the owner of ``matrix`` keeps, of its dtype and on its device, by name.

        The state of a stack of matrices has the dims of the stack, then two of its own. ``matrix`` has no values.
        """
        return {}

    def transform(self, direction: Tensor, fused: Fused | None, state: dict[str, Tensor], rates: Rates) -> Tensor:
        """Return the update of a whole matrix, or of each matrix of a stack ``[..., rows, columns]``.

        ``fused`` describes the matrices that are stored as one; ``state``, of ``new_state``, is updated in place. The
        result depends only on the arguments, so that it does not depend on the layout.
        """
        raise NotImplementedError

    def apply(self, piece: ShardSlice, update: Tensor, rates: Rates) -> None:
        """Decay the weights of ``piece``, which has no state, and subtract its slice of the results."""
        piece.main.mul_(1.0 - rates.lr * rates.weight_decay).add_(update, alpha=-rates.lr)
        write_copy(piece)

    def attach(self, shards: Sequence[Shard], seed: int) -> None:
        """Receive the shards of this rank; see ``JointAlgorithm``."""
        assert self.groups is not None, "an optimizer passes its groups"
        self._stage_groups = self.groups
        self._seed = seed
        self._shards = {shard.bucket: shard for shard in shards}
        self._directions: dict[Bucket, Tensor] = {}
        self._updates: dict[Bucket, Tensor] = {}

    @cached_property
    def rounds(self) -> list[Round]:
        """The plan of every step."""
        return plan_rounds(list(self._shards), self._stage_groups)

    @cached_property
    def states(self) -> dict[MatrixTask, dict[str, Tensor]]:
        """The state of each matrix of which this rank is the owner."""
        states = {}
        for task in (task for round_ in self.rounds for task in round_.tasks):
            weights = task.bucket.weights
            dtype = torch.promote_types(weights.dtype, torch.float32)
            matrix = torch.empty(task.box.shape, dtype=dtype, device=weights.device)
            states[task] = self.new_state(matrix, task.spec.fused)
        return states

    def joint_state(self) -> Iterator[TensorBox]:
        """Yield ``states`` as boxes ``KIND.NAME`` of global tensors, which no other rank has."""
        for task, state in self.states.items():
            lead = task.spec.global_shape[:-2]
            first = task.box.start[:-2]
            for moment, tensor in state.items():
                sizes = tuple(tensor.shape[-2:])
                box = Box((*first, 0, 0), (*task.box.stop[:-2], *sizes))
                name = f"{moment}.{task.bucket.names[task.number]}"
                yield TensorBox(name, (*lead, *sizes), box, tensor, owned=not task.spec.is_copy)

    def update_shards(self, rates: Mapping[Bucket, Rates], meanwhile: Callable[[], None]) -> None:
        """Update all shards, each with its own rates; see ``JointAlgorithm``."""
        rounds = self.rounds
        arriving = self._start_gather(rounds[0], rates) if rounds else None
        meanwhile()
        returning: Arriving | None = None
        for number, round_ in enumerate(rounds):
            following = self._start_gather(rounds[number + 1], rates) if number + 1 < len(rounds) else None
            assert arriving is not None, "every round starts with its messages"
            results = self._transformed(round_, arriving, rates)
            if returning is not None:
                self._finish_scatter(rounds[number - 1], returning, rates)
            returning = self._start_scatter(round_, results)
            arriving = following
        if returning is not None:
            self._finish_scatter(rounds[-1], returning, rates)

    def _start_gather(self, round_: Round, rates: Mapping[Bucket, Rates]) -> Arriving:
        """Compute the directions of the buckets that begin in a round, and start to send them to the owners."""
        for bucket in round_.begins:
            self._directions[bucket] = self._direction(self._shards[bucket], rates[bucket])
            self._updates[bucket] = torch.zeros_like(self._directions[bucket])
        return self._start(round_, round_.gather, self._in_direction)

    def _transformed(
        self, round_: Round, arriving: Arriving, rates: Mapping[Bucket, Rates]
    ) -> dict[MatrixTask, Tensor]:
        """Return the results of this rank's tasks of a round."""
        directions = self._directions
        matrices = {task: directions[task.bucket].new_empty(task.box.shape) for task in round_.tasks}
        for item in round_.gather.local:
            matrices[item[0]][item[1].in_matrix] = self._in_direction(item)
        self._receive(round_.gather, arriving, lambda item: matrices[item[0]][item[1].in_matrix])
        for bucket in round_.ends:
            del directions[bucket]
        return {
            task: self.transform(tensor, task.spec.fused, self.states[task], rates[task.bucket])
            for task, tensor in matrices.items()
        }

    def _start_scatter(self, round_: Round, results: dict[MatrixTask, Tensor]) -> Arriving:
        """Start to send the results of a round to the shards; store the parts that stay on this rank."""
        for item in round_.scatter.local:
            self._in_update(item).copy_(results[item[0]][item[1].in_matrix])
        return self._start(round_, round_.scatter, lambda item: results[item[0]][item[1].in_matrix])

    def _finish_scatter(self, round_: Round, returning: Arriving, rates: Mapping[Bucket, Rates]) -> None:
        """Receive results, and update the buckets that are complete."""
        self._receive(round_.scatter, returning, self._in_update)
        for bucket in round_.ends:
            self._apply(self._shards[bucket], self._updates.pop(bucket), rates[bucket])

    # Messages.

    def _start(self, round_: Round, messages: MatrixMessages, read: Callable[[Item], Tensor]) -> Arriving:
        """Start to send parts of matrices, which ``read`` returns."""
        empty = self._updates[round_.buckets[0]].new_empty(0)
        if messages.is_empty:
            return empty, Done()
        rows = [read(item).reshape(-1) for items in messages.send for item in items]
        send, receive = ([sum(piece.numel for _, piece in items) for items in ranks] for ranks in messages.by_rank)
        return start_all_to_all_rows(torch.cat(rows or [empty]), send, receive, self._stage_groups.group("tp-dp-cp"))

    def _receive(self, messages: MatrixMessages, arriving: Arriving, target_of: Callable[[Item], Tensor]) -> None:
        """Wait for the parts, and copy each to the tensor that ``target_of`` returns."""
        received, handle = arriving
        handle.wait()
        offset = 0
        for items in messages.receive:
            for item in items:
                target = target_of(item)
                target.copy_(received[offset : offset + target.numel()].view(target.shape))
                offset += target.numel()

    def _in_direction(self, item: Item) -> Tensor:
        return _in_shard(self._directions[item[0].bucket], item)

    def _in_update(self, item: Item) -> Tensor:
        return _in_shard(self._updates[item[0].bucket], item)

    # Shards, whose state may be on another device or in bfloat16.

    def _direction(self, shard: Shard, rates: Rates) -> Tensor:
        """Update the state of a shard, and return its direction on the device of the weights."""
        bucket = shard.bucket
        directions: list[Tensor] = []
        state = {name: tensor.to(bucket.weights.device) for name, tensor in shard.state.items()}
        update = self.direction
        everything = slice(0, bucket.grad_shard.numel())
        piece = ShardSlice(bucket.grad_shard, bucket.grad_shard, None, state)
        shard.update(everything, piece, rates, self._seed, lambda piece: directions.append(update(piece, rates)))
        for name, tensor in state.items():
            if tensor is not shard.state[name]:
                shard.state[name].copy_(tensor)
        shard.placement.evict()
        return directions[0]

    def _apply(self, shard: Shard, update: Tensor, rates: Rates) -> None:
        """Update the weights of a shard on the device of the model's weights."""
        bucket = shard.bucket
        stored = shard.main if shard.is_narrow else bucket.weight_shard
        main = stored.to(bucket.weights.device)
        copies_here = shard.is_narrow and main.device == bucket.weight_shard.device
        everything = slice(0, main.numel())
        piece = ShardSlice(bucket.grad_shard, main, bucket.weight_shard if copies_here else None, {})
        shard.update(everything, piece, rates, self._seed, lambda piece: self.apply(piece, update, rates))
        if main is not stored:
            stored.copy_(main)
        if shard.is_narrow and not copies_here:
            bucket.weight_shard.copy_(main)
        for placement in (shard.placement, bucket.placement):
            placement.evict()


def _in_shard(shard: Tensor, item: Item) -> Tensor:
    piece = item[1]
    return shard[piece.flat].view(piece.shape)[piece.inner]


def separated(matrix: Tensor, fused: Fused) -> list[Tensor]:
    """Return the matrices ``[..., rows, columns]`` that ``matrix`` consists of, each with the rows of all blocks."""
    blocks = matrix.unflatten(-2, (-1, sum(fused.rows)))
    return [block.flatten(-3, -2) for block in blocks.split(fused.rows, dim=-2)]


def fused_matrix(matrices: Sequence[Tensor], fused: Fused) -> Tensor:
    """Return the matrix that consists of ``matrices``: the inverse of ``separated``."""
    blocks = [block.unflatten(-2, (-1, rows)) for block, rows in zip(matrices, fused.rows, strict=True)]
    return torch.cat(blocks, dim=-2).flatten(-3, -2)
