"""Defects of FP8 products: scales that depend on the layout, or are outdated."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, assigned, call, condition, without_call

IN_FP8 = (
    Defect(  # C49
        "tensors are scaled by each rank's own columns",
        "features.fp8.products:FP8Products._change_amax",
        condition("False", number=4),
        "tensorwise, tp2 sp",
        "C49",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # C49
        "tensors are scaled by each rank's own part of the sequence",
        "features.fp8.products:FP8Products._change_amax",
        condition("False", number=3),
        "tensorwise, cp2",
        "C49",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "rows are scaled by each rank's own features",
        "features.fp8.products:FP8Products._change_amax",
        without_call("all_reduce_", number=3),
        "rowwise, tp2",
        culprit="output of decoder.layers.0.",
    ),
    Defect(
        "expert matrices are scaled by each rank's part",
        "features.fp8.arithmetic:FP8LayerArithmetic.expert_input_product",
        argument("FP8Products", 1, "ALONE"),
        "rowwise, experts, etp2",
        culprit="output of decoder.layers.?.mlp",
    ),
    Defect(
        "a token has the scales of the one before it in the message",
        "features.mxfp8_messages.messages:Unpacked.wait",
        argument("Quantised", 1, "OLD.roll(1, 0)"),
        "messages, tp2 sp ep2 etp1",
        culprit="output of decoder.layers.0.mlp",
    ),
    Defect(  # C49
        "histories are those of each rank's micro-batches",
        "features.fp8.amax_history:AmaxHistories.update",
        without_call("all_reduce_"),
        "delayed, dp2 zero1",
        "C49",
        culprit="output of *in step",
    ),
    Defect(  # C49
        "scales from the history have no margin",
        "features.fp8.amax_history:roll",
        argument("roll_natively", "divisor", "1.0"),
        "delayed, dp2 zero1",
        "C49",
        culprit="output of *in step",
    ),
    Defect(  # C49
        "the amax of gradients is never recorded",
        "features.fp8.products:FP8Products.quantise",
        assigned("place", "self._recorded_of(role, x.device) if record and role != 'grad' else None"),
        "delayed, pp2 zb_h1",
        "C49",
        culprit="gradient of the output of *in step or gradient of the parameter *in step",
    ),
    Defect(  # C49
        "the amax of a step is that of its last micro-batch",
        "features.fp8.products:FP8Products._change_amax",
        call("maximum", "SECOND"),
        "delayed, tp2",
        "C49",
        culprit="output of *in step",
    ),
    Defect(  # C49
        "what a step recorded stays for the next one",
        "features.fp8.amax_history:roll",
        argument("roll_natively", 0, "OLD.clone()"),
        "delayed, tp2",
        "C49",
        culprit="output of *in step",
    ),
    Defect(
        "a transposed matrix keeps the order of its blocks",
        "features.fp8.casts:Quantised.t",
        argument("Quantised", 1, "self.scale.reshape(OLD.shape)"),
        "blockwise, tp2",
        culprit="gradient of the output of  or output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the first and the last layer are in FP8, too",
        "features.fp8.arithmetic:FP8Arithmetic.of_layer",
        condition("False"),
        "tensorwise, first layer in bf16, tp2",
        culprit="output of decoder.layers.0.self_attention",
    ),
)
