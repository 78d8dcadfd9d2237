"""Defects of FP8 products: scales that depend on the layout, or are outdated."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_FP8 = (
    Defect(  # C49
        "tensors are scaled by each rank's own columns",
        "tensor_parallel.fp8:FP8Products.scale_of_amax",
        "if blocks.columns is None:",
        "if False:",
        "tensorwise, tp2 sp",
        "C49",
    ),
    Defect(  # C49
        "tensors are scaled by each rank's own part of the sequence",
        "tensor_parallel.fp8:FP8Products.scale_of_amax",
        "if blocks.rows is None:",
        "if False:",
        "tensorwise, cp2",
        "C49",
    ),
    Defect(
        "rows are scaled by each rank's own features",
        "tensor_parallel.fp8:FP8Products.scale_of_amax",
        "all_reduce_(amax, columns, maximum=True)",
        "pass",
        "rowwise, tp2",
    ),
    Defect(
        "expert matrices are scaled by each rank's part",
        "transformer.moe.experts:GroupedLinear.__init__",
        "(ALONE, etp) if splits_output else (etp, ALONE)",
        "(ALONE, ALONE)",
        "rowwise, experts, etp2",
    ),
    Defect(  # C49
        "histories are those of each rank's micro-batches",
        "tensor_parallel.amax_history:AmaxHistories.update",
        "all_reduce_(latest, self.group, maximum=True)",
        "pass",
        "delayed, dp2 zero1",
        "C49",
    ),
    Defect(  # C49
        "scales are those of the oldest step of the history",
        "tensor_parallel.fp8:FP8Products._scale_of_history",
        "past.amax()",
        "past[-1]",
        "delayed, dp2 zero1",
        "C49",
    ),
    Defect(  # C49
        "the amax of gradients is never recorded",
        "tensor_parallel.fp8:FP8Products._record",
        "amax.amax().to(own.dtype)",
        "amax.amax().to(own.dtype) * (role != 'grad')",
        "delayed, pp2 zb_h1",
        "C49",
    ),
    Defect(  # C49
        "the amax of a step is that of its last micro-batch",
        "tensor_parallel.fp8:FP8Products._record",
        "torch.maximum(own, amax.amax().to(own.dtype))",
        "amax.amax().to(own.dtype)",
        "delayed, tp2",
        "C49",
    ),
    Defect(  # C49
        "what a step recorded stays for the next one",
        "tensor_parallel.amax_history:AmaxHistories.update",
        "layer.recorded.zero_()",
        "pass",
        "delayed, tp2",
        "C49",
    ),
    Defect(
        "a transposed matrix keeps the order of its blocks",
        "ops.fp8:Quantised.t",
        "self.scale.mT",
        "self.scale.reshape(self.scale.mT.shape)",
        "blockwise, tp2",
    ),
    Defect(
        "the first and the last layer are in FP8, too",
        "transformer.context:LayerContext.of_layer",
        "layer_number in precision.layers",
        "True",
        "tensorwise, first layer in bf16, tp2",
    ),
)
