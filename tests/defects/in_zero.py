"""Defects in sharded gradients and weights: ZeRO 2 and 3, hybrid sharding."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, assigned, attribute, call, condition, expression, returned, without_call

IN_ZERO = (
    Defect(  # C35
        "a shard is added to its sum twice",
        "data_parallel.buffer:Bucket.finish_reduce",
        call("add_", "OLD.add_(FIRST)"),
        "dp2 zero2",
        "C35",
        culprit="gradient of the parameter ",
    ),
    Defect(  # C35
        "of sharded gradients only the last micro-batch's survive",
        "data_parallel.buffer:Bucket.finish_reduce",
        condition("False", number=4),
        "dp2 zero2",
        "C35",
        culprit="gradient of the parameter ",
    ),
    Defect(  # C12 C60
        "a tied weight's next gradient is added to the one that is being reduced",
        "data_parallel.buffer:Bucket.open_grads",
        without_call("finish_reduce"),
        "dp2 zero2, overlap",
        "C12 C60",
        culprit="gradient of the parameter embedding.word_embeddings",
    ),
    Defect(  # C17
        "shards of partial gradients are never completed",
        "data_parallel.wrapper:DataParallel.finish_grad_sync",
        without_call("complete_shard"),
        "dp2 tp2 sp zero3, overlap",
        "C17",
        culprit="gradient of the parameter ",
    ),
    Defect(  # C19
        "gradients of shared keys and values are split before they are completed",
        "data_parallel.wrapper:DataParallel._start_reduce",
        without_call(""),
        "1 group, dp2 tp2 zero3",
        "C19",
        culprit="gradient of the parameter decoder.layers.3.self_attention.linear_qkv",
    ),
    Defect(  # C59
        "gathered weights stay when their shards have changed",
        "data_parallel.wrapper:DataParallel.start_param_sync",
        without_call("release"),
        "dp2 zero3, weights kept",
        "C59",
        culprit="updated weight ",
    ),
    Defect(
        "instances of hybrid sharding never meet",
        "data_parallel.wrapper:DataParallel.finish_grad_sync",
        without_call("sum_over_instances"),
        "dp4 zero2 in 2 instances",
        culprit="gradient of the parameter ",
    ),
    Defect(  # C37
        "instances of hybrid sharding count in the norm each",
        "data_parallel.buffer:Bucket.is_writer",
        returned("self.is_sharded or self.dp_group.rank() == 0"),
        "dp4 zero3 in 2 instances",
        "C37",
        culprit="the gradient norm",
    ),
    Defect(
        "Muon's owner ranks ignore the other ranks' parts",
        "features.matrix_optimizers.updates:MatrixAlgorithm._receive",
        call("copy_", "SELF.zero_()"),
        "muon, dp2 tp2 zero1",
        culprit="updated weight ",
    ),
    Defect(
        "Muon's owners take the parts of one rank for those of another",
        "features.matrix_optimizers.updates:MatrixAlgorithm._receive",
        attribute("receive", "OLD[::-1]"),
        "muon, 1 group, dp2 tp2 zero3",
        culprit="updated weight ",
    ),
    Defect(
        "parts of Muon's matrices arrive transposed",
        "features.matrix_optimizers.updates:MatrixAlgorithm._receive",
        argument("copy_", 0, "SELF.view(FIRST[::-1]).mT"),
        "muon, mup, matrices cut, dp2 pp2 zero1",
        culprit="updated weight ",
    ),
    Defect(
        "results of Muon's matrices are sent in another order than they are received",
        "features.matrix_optimizers.updates:MatrixAlgorithm._start",
        expression(
            "[read(item).reshape(-1) for items in messages.send for item in items]",
            "[read(item).reshape(-1) for items in messages.send for item in (items if messages is "
            "round_.gather else items[::-1])]",
        ),
        "muon, dp2 tp2 zero1",
        culprit="updated weight ",
    ),
    Defect(
        "Muon's matrices stay where they are held as a whole, without the results of this rank",
        "features.matrix_optimizers.updates:MatrixAlgorithm._start_scatter",
        attribute("local", "OLD[1:]"),
        "muon, dp2 tp2 zero1",
        culprit="updated weight ",
    ),
    Defect(
        "Muon's update of the keys goes to the values",
        "features.matrix_optimizers.muon:Muon.orthogonalized",
        argument("fused_matrix", 0, "[*OLD[:-2], *OLD[:-3:-1]]"),
        "muon, dp2 tp2 zero1",
        culprit="updated weight *linear_qkv",
    ),
    Defect(
        "Muon's heads are cut one row late",
        "features.matrix_optimizers.muon:Muon.orthogonalized",
        call(
            "flatten",
            "self._of_part(matrix.roll(-1, SECOND).unflatten(SECOND, (-1, fused.head_size))).flatten("
            "FIRST, SECOND).roll(1, SECOND)",
        ),
        "muon by heads, gate and up apart, 2 groups, dp2 tp2 zero2",
        culprit="updated weight *linear_qkv",
    ),
    Defect(
        "LAMB's norms are of one shard",
        "features.lamb.whole_tensors:reduce_over_tensors",
        without_call("all_reduce_", number=1),
        "lamb, tied, dp2 pp2 zero1",
        culprit="updated weight ",
    ),
    Defect(
        "LAMB's norms are of one tensor-parallel part",
        "features.lamb.whole_tensors:reduce_over_tensors",
        call("sorted", "()"),
        "lamb, 2 groups, dp2 tp2 sp zero2",
        culprit="updated weight ",
    ),
    Defect(
        "LAMB's norm of a tied weight is that of the first stage",
        "features.lamb.whole_tensors:reduce_over_tensors",
        without_call("all_reduce_", number=3),
        "lamb, tied, dp2 pp2 zero1",
        culprit="updated weight embedding.word_embeddings",
    ),
    Defect(
        "learning rates of a wide model are those of its base where shards are",
        "optimizer.sharded:Optimizer._width_factors",
        argument("width_factors", "hidden", "OLD and (not shard.bucket.is_sharded)"),
        "mup, untied, fused loss, dp2 tp2 zero2",
        culprit="updated weight ",
    ),
    Defect(
        "embeddings follow the learning rate of the others",
        "optimizer.sharded:Optimizer._update_all",
        assigned("own_lr", "lr"),
        "sgd, own rate of embeddings, clipped by value, dp2 pp2 zero3",
        culprit="updated weight embedding",
    ),
    Defect(
        "ranks initialise a bucket of stage 3 by its position, not by name",
        "data_parallel.memory:materialise",
        argument("initialise", 0, "str(parameter.shape)"),
        "dp2 zero3, one micro-batch",
        culprit="initial weight ",
    ),
)
