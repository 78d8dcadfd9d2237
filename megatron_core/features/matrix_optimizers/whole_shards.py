"""Buckets whose shards consist of whole parameters, for updates that need all elements of one."""

from collections.abc import Sequence

from megatron_core.data_parallel.bucket_layout import BucketLayout, FillRule, round_up
from megatron_core.data_parallel.settings import SHARD_MULTIPLE, BucketKind, in_order


class WholeInShards:
    """Rule that places each parameter whole in one shard, so that its update is local (optimizers of whole matrices).

    Parameters are placed in order of decreasing cost. Each goes to the shard with the least work in all buckets so far
    among the shards that remain below 1.3 times the mean size; if there is none, to the shortest shard (longest
    processing time first: Graham 1969). A bucket also accepts parameters that fit into the padding of its shards.
    """

    def __init__(self, shards: int, start_multiple: int = 1, shard_multiple: int = 1) -> None:
        self.shards = shards
        self.start_multiple = start_multiple
        self.shard_multiple = shard_multiple
        self.work = [0] * shards

    def is_full(self, sizes: Sequence[int], following: int, bucket_size: int) -> bool:
        """Whether the bucket is full.

        It is full with ``bucket_size`` elements and at least 0.9 times the largest parameter per shard, if the next
        parameter would lengthen it.
        """
        if sum(sizes) < max(bucket_size, int(0.9 * self.shards * max(sizes))):
            return False
        ends = [0] * self.shards
        for size in sizes:
            shortest = ends.index(min(ends))
            ends[shortest] = round_up(ends[shortest], self.start_multiple) + size
        return round_up(min(ends), self.start_multiple) + following > round_up(max(ends), self.shard_multiple)

    def place(self, sizes: Sequence[int], costs: Sequence[int]) -> BucketLayout:
        """Place parameters in shards of equal length."""
        # Equal work alone could place all large and cheap parameters in one shard, and the others would be padding.
        limit = 1.3 * sum(sizes) / self.shards
        ends = [0] * self.shards
        positions = [(0, 0)] * len(sizes)
        # Costs and sizes are those of global shapes, so that all ranks compute the same layout without a message.
        for number in sorted(range(len(sizes)), key=lambda n: -costs[n]):
            starts = [round_up(end, self.start_multiple) for end in ends]
            fit = [shard for shard, start in enumerate(starts) if start + sizes[number] <= limit]
            shard = min(fit, key=self.work.__getitem__) if fit else ends.index(min(ends))
            positions[number] = shard, starts[shard]
            ends[shard] = starts[shard] + sizes[number]
            self.work[shard] += costs[number]
        # Shards are equal in length, as collectives require; shorter ones are padded.
        length = round_up(max(ends), self.shard_multiple)
        offsets = [shard * length + start for shard, start in positions]
        end = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
        return BucketLayout(offsets, end, sum(sizes), length * self.shards)


def whole_matrices(bucket_kind: BucketKind, shards: int) -> FillRule:
    """Return the rule for filling buckets such that no shard cuts a hidden matrix."""
    return whole_parameters(bucket_kind, shards) if bucket_kind.is_hidden_matrix else in_order(bucket_kind, shards)


def whole_parameters(bucket_kind: BucketKind, shards: int) -> FillRule:
    """Return the rule for filling buckets such that no shard cuts a parameter."""
    return WholeInShards(shards, 1, SHARD_MULTIPLE)
