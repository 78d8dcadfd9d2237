"""Defects of pieces of published architectures that are split over ranks."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, assigned, attribute, call, expression, returned, without_statement

IN_HUB = (
    Defect(
        "the temperature of queries counts the positions of a rank",
        "features.positions.temperature:QueryTemperature.of_positions",
        expression(
            "position_ids.t() + first",
            "torch.arange(1, position_ids.shape[1] + 1, device=position_ids.device)[:, None]",
        ),
        "llama 4, cp2 p2p",
        culprit="output of decoder.layers.1.self_attention",
    ),
    Defect(
        "layers with rotary positions have no temperature after a split of the sequence",
        "features.positions.temperature:QueryTemperature.__init__",
        assigned("self.is_active", "OLD and context.cp.whole.size() == 1"),
        "ministral 3, cp2",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "norms of rotated queries and keys count as replicated over tensor-parallel ranks",
        "transformer.attention:SelfAttention.__init__",
        argument("partial", "partial_grad", "not config.qk_layernorm_after_rotary"),
        "hunyuan, tp2 sp",
        culprit="gradient of the parameter *layernorm.weight",
    ),
    Defect(
        "the gradients of the numbers of xIELU are those of a rank's features",
        "transformer.mlp:XIELU.__init__",
        argument("replicated", "partial_grad", "False"),
        "apertus, tp2 sp",
        "C17",
        culprit="gradient of the parameter *alpha*",
    ),
    Defect(
        "every tensor-parallel rank has the slopes of the first heads",
        "features.positions.linear_bias:LinearBias.__init__",
        call("range", "range(heads)"),
        "bloom, tp2 sp",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "linear biases count the positions of a rank",
        "features.positions.linear_bias:LinearBias.of_positions",
        call("t", "torch.arange(SELF.shape[1], device=SELF.device)[:, None]"),
        "bloom, cp2 p2p",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the positions of a rank choose the factors of rotary frequencies",
        "models.gpt.model:GPTModel._rotary",
        argument("rotary_frequencies", 2, "position_ids.shape[1]"),
        "phi-3 with longrope, cp2",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "every tensor-parallel rank has the biases of the first tokens",
        "models.gpt.model:VocabularyHead.__init__",
        argument("split", 2, "OLD if shape[1:] else 0"),
        "phi-3.5-moe, tp2",
        culprit="gradient of the parameter output_layer.bias",
    ),
    Defect(
        "every part of a sequence draws the experts of the first part",
        "features.experts.router:TopKRouter._drawn",
        argument("uniform", 3, "OLD.argsort()"),
        "phi-3.5-moe, drawn experts, tp2 sp ep2 etp1",
        culprit="output of decoder.layers.*.mlp",
    ),
    Defect(
        "all micro-batches draw the same experts",
        "features.experts.router:TopKRouter._drawn",
        argument("uniform", 2, "0 * OLD"),
        "phi-3.5-moe, drawn experts, dp2 zero3",
        culprit="output of decoder.layers.*.mlp",
    ),
    Defect(
        "the outputs of joined parts are not summed over ranks",
        "transformer.joined:JoinedParts.reduced",
        returned("(reduce_scatter_to_sequence if self._scatters else lambda x, _: x)(FIRST, SECOND)"),
        "cohere without dropout, tp2",
        "C2",
        culprit="output of decoder.layers.*.mlp_dropout",
    ),
    Defect(
        "only the last gradient of a shared input is reduced",
        "tensor_parallel.linear_comm:SharedInput.add",
        call("reduce", "SECOND[-1]"),
        "cohere without dropout, full recompute, tp2 sp",
        culprit="gradient of the output of decoder.layers.*.input_layernorm",
    ),
    Defect(
        "each rank adds the bias of joined parts before their sum",
        "transformer.block:TransformerLayer.attend_and_feed_forward",
        call(
            "_add",
            "self._add(FIRST, self.joined.reduced(total if THIRD is None else total + THIRD), None, "
            "self.mlp_dropout, context)",
            number=1,
        ),
        "phi-2 without dropout, tp2 pp2 zb_h1",
        culprit="output of decoder.layers.*.mlp_dropout",
    ),
    Defect(
        "the MLP in parallel with attention has a detached input",
        "transformer.block:TransformerLayer.attend_and_feed_forward",
        argument("_run_mlp", 0, "OLD.detach() if self.recompute_norms else OLD"),
        "cohere, tp2 sp, norms and MLPs recomputed",
        culprit="gradient of the output of decoder.layers.1.input_layernorm",
    ),
    Defect(
        "backward of the MLP in parallel with attention uses the discarded memory of the norm",
        "transformer.block:TransformerLayer.attend_and_feed_forward",
        argument("_dropped", 1, "lambda x: OLD(x) * 1.01"),
        "cohere, tp2 sp, norms and MLPs recomputed",
        culprit="gradient of the output of decoder.layers.1.input_layernorm",
    ),
    Defect(
        "every tensor-parallel rank has the norm weights of the first heads",
        "transformer.norm:NormOfEachHead.__init__",
        argument("split", 2, "0"),
        "cohere, tp2",
        culprit="gradient of the parameter *layernorm.weight",
    ),
    Defect(
        "ranks of a split sequence do not add their gradients of norms without biases",
        "transformer.norm:Norm.__init__",
        argument("replicated", "partial_grad", "OLD and config.norms_have_biases"),
        "cohere, tp2 sp",
        culprit="gradient of the parameter *layernorm.weight",
    ),
    Defect(
        "chunks are counted from the first token of a sequence, not of a document",
        "features.context_parallelism.core_attention:ContextParallelAttention.forward",
        attribute("lengths", "((5, 5, 5, 1),) * query.shape[1]"),
        "llama 4, packed, cp2 tp2",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "all context-parallel ranks attend over whole documents in layers with chunks",
        "transformer.attention:SelfAttention.attend",
        attribute("has_chunks", "OLD and (not hasattr(self.core_attention, 'exchange'))"),
        "llama 4, cp2 p2p",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the gradient of the norm of embeddings is that of a rank's tokens",
        "models.gpt.embedding:LanguageModelEmbedding.__init__",
        argument("", "partial_grad", "False"),
        "norm of embeddings, tp2 sp",
        "C17",
        culprit="gradient of the parameter *embedding.norm*",
    ),
    Defect(
        "embeddings are not normalized",
        "models.gpt.embedding:LanguageModelEmbedding.forward",
        without_statement("hidden = self.norm(hidden)"),
        "nanochat, tp2 sp",
        culprit="output of embedding",
    ),
)
