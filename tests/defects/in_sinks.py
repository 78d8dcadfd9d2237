"""Defects of attention sinks and of the biases of experts split over ranks."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, attribute, call

IN_SINKS = (
    Defect(
        "every tensor-parallel rank has the sinks of the first heads",
        "transformer.attention:SelfAttention.__init__",
        argument("split", 2, "0"),
        "gpt-oss, tp2",
        culprit="output of decoder.layers.0.self_attention or initial weight *softmax_offset",
    ),
    Defect(
        "every rank of an all-to-all has the sinks of the first heads",
        "features.context_parallelism.core_attention:HeadParallelAttention.forward",
        call("rank", "0", number=1),
        "gpt-oss, cp2 a2a, dropout",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the gradient of a sink counts the queries of one sequence",
        "features.context_parallelism.attention:_SplitAttention.backward",
        call("sum", "SELF[0].sum(-1)", number=1),
        "sinks, micro-batches of 2",
        culprit="gradient of the parameter *softmax_offset",
    ),
    Defect(  # C17
        "gradients of experts' output biases are not summed over the ranks of an expert",
        "features.experts.experts:Experts.__init__",
        argument("replicated", "partial_grad", "False"),
        "gpt-oss, tp2",
        "C17",
        culprit="gradient of the parameter *experts.linear_fc2.bias",
    ),
    Defect(
        "every rank of an expert adds its output bias",
        "features.experts.experts:Experts.forward",
        attribute("adds_bias", "1"),
        "gpt-oss, tp2",
        culprit="output of decoder.layers.?.mlp or gradient",
    ),
    Defect(  # C42
        "gate and value of an expert's bias are cut as one vector",
        "features.experts.experts:Experts.__init__",
        argument("split_fused", 1, "(sum(OLD),)", number=2),
        "gpt-oss, tp2",
        "C42",
        culprit="gradient of the parameter *experts.linear_fc1.bias or gradient",
    ),
)
