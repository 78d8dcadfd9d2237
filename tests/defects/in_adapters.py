"""Defects of low-rank adapters: partial gradients, sums, rows of parts, masks."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_ADAPTERS = (
    Defect(
        "adapters of joined parts are added on every rank",
        "features.lora.adapters:add_to_stage",
        "separate_parts(layers.values())",
        "pass",
        "lora, one norm of attention and MLP, tp2",
        culprit="*",
    ),
    Defect(
        "gradients of A are not summed over a split sequence",
        "features.lora.layer:LoRA.__init__",
        "partial = sequence_parallel or self.is_expert",
        "partial = self.is_expert",
        "lora, tp2 sp",
        "C17",
        culprit="gradient of the parameter decoder.layers.*.adapter.lora_*",
    ),
    Defect(
        "gradients of experts' A are not summed over the ranks that split an expert",
        "features.lora.layer:LoRA.__init__",
        "partial = sequence_parallel or self.is_expert",
        "partial = sequence_parallel",
        "lora of experts, tp2 etp2",
        "C17",
        culprit="gradient of the parameter decoder.layers.*.adapter.lora_*",
    ),
    Defect(
        "A x of split inputs is not summed over ranks",
        "features.lora.layer:LoRA._exchanged",
        "else reduce_from_region",
        "else (lambda x, group: x)",
        "lora, tp2",
        "C18",
        culprit="*",
    ),
    Defect(
        "the gradient of A x is one rank's part",
        "features.lora.layer:LoRA._exchanged",
        "else copy_to_region)",
        "else (lambda x, group: x))",
        "lora, tp2",
        "C19",
        culprit="gradient of the parameter decoder.layers.*.adapter.lora_A*",
    ),
    Defect(
        "norms of DoRA's rows are those of a rank's inputs",
        "features.lora.layer:LoRA._norms",
        "self.group.size() > 1",
        "self.group.size() > 9",
        "dora, modern, parts, 2 groups, tp2 sp",
        "C8",
        culprit="*",
    ),
    Defect(
        "dropout of split inputs numbers each rank's features from 0",
        "features.lora.adapters:InputDropout.forward",
        "torch.arange(*self.features, device=x.device)",
        "torch.arange(x.shape[-1], device=x.device)",
        "lora, tp2",
        "C20",
        culprit="*",
    ),
    Defect(
        "rows of a part are placed from the rank's first row",
        "features.lora.layer:_local_rows",
        "range(offset + max(first, start) - first, offset + min(end, stop) - first)",
        "range(max(first, start) - first, min(end, stop) - first)",
        "dora, modern, parts, 1 group, tp2",
        "C19",
        culprit="*",
    ),
)
