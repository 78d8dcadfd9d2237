"""Defects of low-rank adapters: partial gradients, sums, rows of parts, masks."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, call, constant, expression, without_call

IN_ADAPTERS = (
    Defect(
        "adapters of joined parts are added on every rank",
        "features.lora.adapters:add_to_stage",
        without_call("separate_parts"),
        "lora, one norm of attention and MLP, tp2",
        culprit="*",
    ),
    Defect(
        "gradients of A are not summed over a split sequence",
        "features.lora.layer:LoRA.__init__",
        expression("sequence_parallel or self.is_expert", "self.is_expert"),
        "lora, tp2 sp",
        "C17",
        culprit="gradient of the parameter decoder.layers.*.adapter.lora_*",
    ),
    Defect(
        "gradients of experts' A are not summed over the ranks that split an expert",
        "features.lora.layer:LoRA.__init__",
        expression("sequence_parallel or self.is_expert", "sequence_parallel"),
        "lora of experts, tp2 etp2",
        "C17",
        culprit="gradient of the parameter decoder.layers.*.adapter.lora_*",
    ),
    Defect(
        "A x of split inputs is not summed over ranks",
        "features.lora.layer:LoRA._exchanged",
        expression("reduce_from_region", "lambda x, group: x"),
        "lora, tp2",
        "C18",
        culprit="*",
    ),
    Defect(
        "the gradient of A x is one rank's part",
        "features.lora.layer:LoRA._exchanged",
        expression("copy_to_region", "lambda x, group: x"),
        "lora, tp2",
        "C19",
        culprit="gradient of the parameter decoder.layers.*.adapter.lora_A*",
    ),
    Defect(
        "norms of DoRA's rows are those of a rank's inputs",
        "features.lora.layer:LoRA._norms",
        constant(1, "9", number=2),
        "dora, modern, parts, 2 groups, tp2 sp",
        "C8",
        culprit="*",
    ),
    Defect(
        "dropout of split inputs numbers each rank's features from 0",
        "features.lora.adapters:InputDropout.forward",
        argument("arange", 0, "x.shape[-1]"),
        "lora, tp2",
        "C20",
        culprit="*",
    ),
    Defect(
        "rows of a part are placed from the rank's first row",
        "features.lora.layer:_local_rows",
        call("range", "range(max(first, start) - first, min(end, stop) - first)"),
        "dora, modern, parts, 1 group, tp2",
        "C19",
        culprit="*",
    ),
)
