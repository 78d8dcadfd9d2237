"""Defects of attention sinks and of the biases of experts split over ranks."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_SINKS = (
    Defect(
        "every tensor-parallel rank has the sinks of the first heads",
        "transformer.attention:SelfAttention.__init__",
        "split((config.num_attention_heads,), 0, context.tp_group.rank(), size)",
        "split((config.num_attention_heads,), 0, 0, size)",
        "gpt-oss, tp2",
        culprit="output of decoder.layers.0.self_attention or initial weight *softmax_offset",
    ),
    Defect(
        "every rank of an all-to-all has the sinks of the first heads",
        "transformer.context_parallel_attention:HeadParallelAttention.forward",
        "sinks.chunk(self.exchange.group.size())[self.exchange.group.rank()]",
        "sinks.chunk(self.exchange.group.size())[0]",
        "gpt-oss, cp2 a2a, dropout",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the gradient of a sink counts the queries of one sequence",
        "context_parallel.attention:_SplitAttention.backward",
        "(weights * (grad * out).sum(-1)).sum((0, 2))",
        "(weights * (grad * out).sum(-1))[0].sum(-1)",
        "sinks, micro-batches of 2",
        culprit="gradient of the parameter *softmax_offset",
    ),
    Defect(  # C17
        "gradients of experts' output biases are not summed over the ranks of an expert",
        "transformer.moe.experts:Experts.__init__",
        "partial_grad=True",
        "partial_grad=False",
        "gpt-oss, tp2",
        "C17",
        culprit="gradient of the parameter *experts.linear_fc2.bias",
    ),
    Defect(
        "every rank of an expert adds its output bias",
        "transformer.moe.experts:Experts.forward",
        "(probs * self.adds_bias)",
        "(probs * 1)",
        "gpt-oss, tp2",
        culprit="output of decoder.layers.?.mlp or gradient",
    ),
    Defect(  # C42
        "gate and value of an expert's bias are cut as one vector",
        "transformer.moe.experts:Experts.__init__",
        "split_fused(first[:2], pieces, *etp,",
        "split_fused(first[:2], (sum(pieces),), *etp,",
        "gpt-oss, tp2",
        "C42",
        culprit="gradient of the parameter *experts.linear_fc1.bias or gradient",
    ),
)
