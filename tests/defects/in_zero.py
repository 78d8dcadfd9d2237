"""Defects in sharded gradients and weights: ZeRO 2 and 3, hybrid sharding."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_ZERO = (
    Defect(  # C35
        "a shard is added to its sum twice",
        "data_parallel.buffer:Bucket.finish_reduce",
        "self.grad_shard.add_(total)",
        "self.grad_shard.add_(total).add_(total)",
        "dp2 zero2",
        "C35",
    ),
    Defect(  # C35
        "of sharded gradients only the last micro-batch's survive",
        "data_parallel.buffer:Bucket.finish_reduce",
        "if self._has_sum and self.splits_grads:",
        "if False:",
        "dp2 zero2",
        "C35",
    ),
    Defect(  # C12 C60
        "a tied weight's next gradient is added to the one that is being reduced",
        "data_parallel.buffer:Bucket.open_grads",
        "self.finish_reduce()",
        "pass",
        "dp2 zero2, overlap",
        "C12 C60",
    ),
    Defect(  # C17
        "shards of partial gradients are never completed",
        "data_parallel.wrapper:DataParallel.finish_grad_sync",
        "_complete_shard(bucket, self.groups)",
        "pass",
        "dp2 tp2 sp zero3, overlap",
        "C17",
    ),
    Defect(  # C19
        "gradients of shared keys and values are split before they are completed",
        "data_parallel.wrapper:DataParallel._start_reduce",
        "(_complete_shared if bucket.completes_shard else _complete_gradients)(bucket, self.groups)",
        "pass",
        "1 group, dp2 tp2 zero3",
        "C19",
    ),
    Defect(  # C59
        "gathered weights stay when their shards have changed",
        "data_parallel.wrapper:DataParallel.start_param_sync",
        "sync.release()",
        "pass",
        "dp2 zero3, weights kept",
        "C59",
    ),
    Defect(
        "instances of hybrid sharding never meet",
        "data_parallel.wrapper:DataParallel.finish_grad_sync",
        "bucket.sum_over_instances()",
        "pass",
        "dp4 zero2 in 2 instances",
    ),
    Defect(  # C37
        "instances of hybrid sharding count in the norm each",
        "data_parallel.buffer:Bucket.is_writer",
        " and self.instances.rank() == 0",
        "",
        "dp4 zero3 in 2 instances",
        "C37",
    ),
    Defect(
        "Muon makes each tensor-parallel rank's part orthogonal on its own",
        "optimizer.algorithms:Muon._of_parameter",
        "for axis in spec.split_axes:",
        "for axis in ():",
        "muon, dp2 tp2 zero1",
    ),
    Defect(
        "Muon makes shards orthogonal with last step's momentum of the other ranks",
        "optimizer.algorithms:Muon._orthogonalized",
        "all_gather_flat_(whole, direction, bucket.dp_group).wait()",
        "whole.zero_()[bucket.shard] = direction",
        "muon, mup, matrices cut, dp2 pp2 zero1",
    ),
    Defect(
        "the first matrix of each shard is never made orthogonal",
        "optimizer.algorithms:Muon._orthogonalized",
        "in bucket.pieces():",
        "in list(bucket.pieces())[1:]:",
        "muon, dp2 tp2 zero1",
    ),
    Defect(
        "learning rates of a wide model are those of its base where shards are",
        "optimizer.sharded:Optimizer._width_factors",
        "hidden=shard.bucket.kind.is_hidden_matrix",
        "hidden=shard.bucket.kind.is_hidden_matrix and not shard.bucket.is_sharded",
        "mup, untied, fused loss, dp2 tp2 zero2",
    ),
    Defect(
        "embeddings follow the learning rate of the others",
        "optimizer.sharded:Optimizer._update_all",
        "lr if decoupled_lr is None or not group.embedding else decoupled_lr",
        "lr",
        "sgd, own rate of embeddings, clipped by value, dp2 pp2 zero3",
    ),
    Defect(
        "ranks initialise a bucket of stage 3 by its position, not by name",
        "data_parallel.buffer:materialise",
        "initialise(name, parameter)",
        "initialise(str(parameter.shape), parameter)",
        "dp2 zero3, one micro-batch",
    ),
)
