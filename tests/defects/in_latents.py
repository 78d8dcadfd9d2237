"""Defects of latent attention (partial gradients) and of multi-token prediction (shifts, counts, a copy)."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, call

IN_LATENTS = (
    Defect(
        "the part of the keys that all heads share has one rank's gradient",
        "tensor_parallel.arithmetic:LayerArithmetic.gather_shared",
        call("copy_to_region", "FIRST"),
        "latent attention, tp2",
        "C19",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm or "
            "gradient of the parameter decoder.layers.1.self_attention"
        ),
    ),
    Defect(
        "the shared part of the keys has one rank's gradient with sequence parallelism",
        "tensor_parallel.arithmetic:LayerArithmetic.gather_shared",
        call("gather_from_sequence", "gather_from_sequence(FIRST, SECOND, partial_grad=False)"),
        "latent attention, tp2 sp",
        "C19",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm or "
            "gradient of the parameter decoder.layers.1.self_attention"
        ),
    ),
    Defect(
        "gradients of down projections are not summed over a split sequence",
        "transformer.down_projection:DownProjection.__init__",
        argument("replicated", "partial_grad", "False"),
        "latent attention, tp2 sp",
        "C17",
        culprit="gradient of the parameter decoder.layers.1.self_attention.linear_*down",
    ),
    Defect(
        "gradients of the latents' norms are summed without sequence parallelism, too",
        "features.latent_attention.attention:LatentAttention.__init__",
        argument("norm", "partial_grad", "True", number=2),
        "latent attention, tp2",
        "C17",
        culprit="gradient of the parameter decoder.layers.1.self_attention.*_layernorm",
    ),
    Defect(  # C5
        "losses of later tokens are divided by each rank's own number of tokens",
        "training.driver:forward_backward",
        argument("all_reduce_", 0, "OLD[:1]"),
        "multi-token prediction, dp2",
        "C3 C5",
        culprit="*; the loss is wrong before it or the loss that is reported or gradient of the output of *mtp",
    ),
    Defect(
        "hidden states of the next position are sought on this rank alone",
        "features.multi_token.block:HiddenStateMixing._next_positions",
        call("gather_from_sequence", "FIRST"),
        "multi-token prediction, tp2 sp, mixed",
        "C17",
        culprit="*mtp*",
    ),
    Defect(  # C5
        "later tokens are sought in each rank's own part of the sequence",
        "parallel.micro_batch:LaterTokens.of",
        call("append", "SELF.append(_ahead(split.local(labels if SELF is by_name[0] else masks), ahead).to(device))"),
        "cp2 tp2 sp, multi-token prediction",
        "C5 C25",
        culprit="output of mtp",
    ),
    Defect(
        "later tokens of the next document count",
        "parallel.micro_batch:LaterTokens.of",
        argument("zip", 1, "(_ahead(labels, ahead), _ahead(masks, ahead))"),
        "multi-token prediction, packed, untied, dp2 zero3, recompute",
        "C45",
        culprit="gradient of the output of *mtp",
    ),
    Defect(
        "the last stage's embedding is a weight of its own",
        "models.gpt.model:GPTModel.__init__",
        argument("amend_spec", "is_copy", "OLD and self.mtp is None"),
        "multi-token prediction, untied, pp2",
        "C11",
        culprit="initial weight mtp.word_embeddings or initial weight embedding.word_embeddings",
    ),
    Defect(
        "the last application of a repeated layer replaces the load of its experts by the others",
        "features.multi_token.block:MultiTokenPredictionBlock.predict",
        call("replace", "FIRST"),
        "a repeated layer of multi-token prediction with experts, tp2 sp ep2 etp1",
        culprit="report0.*load of layer 3",
    ),
    Defect(
        "each part of a split sequence predicts from the tokens of the first",
        "features.multi_token.block:MultiTokenPredictionLayer._forward",
        call("scatter_to_sequence", "FIRST[:FIRST.shape[0] // SECOND.size()]"),
        "multi-token prediction, tp2 sp",
        culprit="output of *mtp",
    ),
)
