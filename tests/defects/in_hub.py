"""Defects of pieces of published architectures that are split over ranks."""

from __future__ import annotations

from tests.defects.defect import Defect

IN_HUB = (
    Defect(
        "the temperature of queries counts the positions of a rank",
        "transformer.rotary:query_temperature",
        "(position_ids.t() + 1)",
        "(torch.arange(1, position_ids.shape[1] + 1, device=position_ids.device)[:, None])",
        "llama 4, cp2 p2p",
        culprit="output of decoder.layers.1.self_attention",
    ),
    Defect(
        "the positions of a rank choose the factors of rotary frequencies",
        "models.gpt.model:GPTModel._rotary",
        "self.model_config, channels, self.max_sequence_length",
        "self.model_config, channels, position_ids.shape[1]",
        "phi-3 with longrope, cp2",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "every tensor-parallel rank has the biases of the first tokens",
        "models.gpt.model:GPTModel._make_output_layer",
        "split((self.vocab_size, *shape[1:]), 0, index, size, padded=shape[0])",
        "split((self.vocab_size, *shape[1:]), 0, index if shape[1:] else 0, size, padded=shape[0])",
        "phi-3.5-moe, tp2",
        culprit="gradient of the parameter output_layer.bias",
    ),
    Defect(
        "every part of a sequence draws the experts of the first part",
        "transformer.moe.router:TopKRouter._drawn",
        "context.sample_index, tokens.positions)",
        "context.sample_index, tokens.positions.argsort())",
        "phi-3.5-moe, drawn experts, tp2 sp ep2 etp1",
    ),
    Defect(
        "all micro-batches draw the same experts",
        "transformer.moe.router:TopKRouter._drawn",
        "self.sampling_key, context.sample_index,",
        "self.sampling_key, 0 * context.sample_index,",
        "phi-3.5-moe, drawn experts, dp2 zero3",
    ),
    Defect(
        "the MLP in parallel with attention has a detached input",
        "transformer.block:TransformerLayer.attend_and_feed_forward",
        "self._run_mlp(normed, context)",
        "self._run_mlp(normed.detach() if self.recompute_norms else normed, context)",
        "cohere, tp2 sp, norms and MLPs recomputed",
        culprit="gradient of the output of decoder.layers.1.input_layernorm",
    ),
    Defect(
        "backward of the MLP in parallel with attention uses the discarded memory of the norm",
        "transformer.block:TransformerLayer.attend_and_feed_forward",
        "self._dropped(normed, self.input_layernorm, hidden)",
        "self._dropped(normed, lambda x: self.input_layernorm(x) * 1.01, hidden)",
        "cohere, tp2 sp, norms and MLPs recomputed",
        culprit="gradient of the output of decoder.layers.1.input_layernorm",
    ),
    Defect(
        "every tensor-parallel rank has the norm weights of the first heads",
        "transformer.norm:NormOfEachHead.__init__",
        "split((size * heads,), 0, group.rank(), group.size())",
        "split((size * heads,), 0, 0, group.size())",
        "cohere, tp2",
        culprit="gradient of the parameter *layernorm.weight",
    ),
    Defect(
        "ranks of a split sequence do not add their gradients of norms without biases",
        "transformer.norm:Norm.__init__",
        "partial_grad=partial_grad",
        "partial_grad=partial_grad and config.norms_have_biases",
        "cohere, tp2 sp",
        culprit="gradient of the parameter *layernorm.weight",
    ),
    Defect(
        "chunks are counted from the first token of a sequence, not of a document",
        "transformer.context_parallel_attention:ContextParallelAttention.forward",
        "documents = None if context.documents is None else context.documents.lengths",
        "documents = None if context.documents is None else ((5, 5, 5, 1),) * query.shape[1]",
        "llama 4, packed, cp2 tp2",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "all context-parallel ranks attend over whole documents in layers with chunks",
        "transformer.attention:SelfAttention.attend",
        "if self.has_chunks:",
        "if self.has_chunks and not hasattr(self.core_attention, 'exchange'):",
        "llama 4, cp2 p2p",
        culprit="output of decoder.layers.0.self_attention",
    ),
)
