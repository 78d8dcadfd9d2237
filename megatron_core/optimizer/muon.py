"""Muon: momentum whose matrices are made orthogonal, whatever tensor parallelism and ZeRO have split them into.

Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon) for the iteration, Liu et al. 2025 (arXiv 2502.16982),
section 2.2, for the scale, with which learning rate and weight decay are those of AdamW.
"""

import torch
from torch import Tensor, nn

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import Bucket
from megatron_core.data_parallel.buffer import BucketKind
from megatron_core.data_parallel.fill import SHARD_MULTIPLE, in_order
from megatron_core.data_parallel.layout import Rule, WholeInShards
from megatron_core.optimizer.algorithms import Part, Rates, write_copy
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import spec_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that drives singular values to about 1 fastest."""


class Muon:
    """m = mu m + g; u = g + mu m (Nesterov); w = (1 - lr wd) w - lr 0.2 sqrt(max(rows, columns)) orthogonal(u).

    It is for hidden matrices; the rest is AdamW's. Orthogonal is what ``newton_schulz`` makes of the whole stored
    matrix (fused QKV and gate-up matrices as they are; of experts each one). Every data-parallel rank orthogonalises
    its share of a bucket's matrices: those that lie in its shard, if none is cut (``whole_matrices``), or else every
    nth, which ranks collect from one another before and send afterwards.
    """

    names = ("momentum_buffer",)

    def __init__(self, config: OptimizerConfig, groups: ParallelGroups) -> None:
        self.momentum, self.steps, self.groups = config.muon_momentum, config.muon_num_ns_steps, groups

    @staticmethod
    def whole_matrices(kind: BucketKind, shards: int) -> Rule:
        """How buckets are filled so that no shard cuts a hidden matrix."""
        return WholeInShards(shards, 1, SHARD_MULTIPLE) if kind.is_hidden_matrix else in_order(kind, shards)

    def update_bucket(self, bucket: Bucket, part: Part, rates: Rates) -> None:
        """Update the shard of ``bucket`` that ``part`` is; all ranks that share the bucket's tensors call this."""
        momentum = part.state["momentum_buffer"]
        grad = part.grad.mul_(rates.factor).to(momentum.dtype)
        momentum.mul_(self.momentum).add_(grad)
        direction = grad.add(momentum, alpha=self.momentum)
        orthogonal = self._orthogonalised(bucket, direction)
        part.main.mul_(1.0 - rates.lr * rates.weight_decay).add_(orthogonal, alpha=-rates.lr)
        write_copy(part)

    def _orthogonalised(self, bucket: Bucket, direction: Tensor) -> Tensor:
        """The scaled orthogonal directions of this rank's shard."""
        size, rank = bucket.dp_group.size(), bucket.dp_group.rank()
        whole = direction
        if bucket.is_sharded and not bucket.cuts_parameters:  # no other rank has a part of what lies here
            result = torch.zeros_like(direction)
            for _, parameter, _, numel, at in bucket.pieces():
                flat = slice(at, at + numel)
                result[flat] = self._of_parameter(parameter, direction[flat].view(parameter.shape)).view(-1)
            return result
        if bucket.is_sharded and size > 1:
            whole = direction.new_empty(bucket.weights.numel())
            all_gather_flat_(whole, direction, bucket.dp_group).wait()
        result = torch.zeros_like(whole)
        for number, (parameter, at) in enumerate(zip(bucket.parameters, bucket.offsets, strict=True)):
            if number % size == rank:
                flat = slice(at, at + parameter.numel())
                result[flat] = self._of_parameter(parameter, whole[flat].view(parameter.shape)).view(-1)
        all_reduce_(result, bucket.dp_group)
        return result[bucket.shard] if bucket.is_sharded and size > 1 else result

    def _of_parameter(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """Put the global matrix together, make it orthogonal, and take this rank's part of it again."""
        spec = spec_of(parameter)
        full = local.new_zeros(spec.global_shape)
        for box in spec.parts:
            if box.owned or not spec.splits:
                full[box.whole.index] = local[box.local.index]
        for axis in spec.split_axes:
            all_reduce_(full, self.groups.group(axis))
        scale = 0.2 * max(full.shape[-2:]) ** 0.5
        part = torch.empty_like(local)
        spec.localise(newton_schulz(full, self.steps).mul_(scale), part)
        return part


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """``[..., r, c]`` with its singular values driven to about 1 (0.7 to 1.2 after 5 steps), in its own dtype."""
    a, b, c = COEFFICIENTS
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if matrix.shape[-2] > matrix.shape[-1] else x).contiguous()
