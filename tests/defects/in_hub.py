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
        "every tensor-parallel rank has the biases of the first tokens",
        "models.gpt.model:GPTModel._make_output_layer",
        "split((self.vocab_size, *shape[1:]), 0, index, size, padded=shape[0])",
        "split((self.vocab_size, *shape[1:]), 0, index if shape[1:] else 0, size, padded=shape[0])",
        "phi-3.5-moe, tp2",
        culprit="gradient of the parameter output_layer.bias or update of the weight output_layer.bias",
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
