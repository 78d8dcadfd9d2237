"""Defects in the computation of a tensor-parallel rank."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, assigned, attribute, call, expression, returned, statement, without_call

IN_LAYERS = (
    # Partial gradients of tensor-parallel ranks.
    Defect(  # C17
        "sequence-parallel norm gradients are not summed over tp",
        "transformer.block:TransformerLayer.__init__",
        call("norm", "FIRST(context, context.config.hidden_size, partial_grad=False)", number=1),
        "tp2 sp",
        "C17",
        culprit="gradient of the parameter decoder.layers.3.input_layernorm",
    ),
    Defect(  # C17
        "sequence-parallel norm gradients are averaged over tp",
        "data_parallel.early_sums:_sum_over_model_axes",
        argument("all_reduce_", 0, "OLD.div_(groups.size(axis))", number=1),
        "tp2 sp",
        "C17",
        culprit="gradient of the parameter decoder.final_layernorm",
    ),
    Defect(  # C17
        "gradients of learned positions are not summed over a split sequence",
        "models.gpt.embedding:PositionEmbedding.__init__",
        argument("replicated", "partial_grad", "False"),
        "tp2 sp",
        "C17",
        culprit="gradient of the parameter embedding.position_embeddings",
    ),
    Defect(  # C17
        "row-parallel bias gradients are not summed over a split sequence",
        "tensor_parallel.layers:RowParallelLinear.__init__",
        argument("replicated", "partial_grad", "False"),
        "tp2 sp",
        "C17",
        culprit="gradient of the parameter decoder.layers.3.mlp.linear_fc2.bias",
    ),
    Defect(  # C18
        "norms of keys without weights are taken over the heads of a rank",
        "transformer.norm:L2Norm.forward",
        argument("rms_norm", 1, "x.shape[-2:]"),
        "norms without weights, layers without positions, tp2 sp",
        "C18",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # C18
        "query and key norm gradients are summed with sequence parallel only",
        "transformer.attention:SelfAttention.__init__",
        argument("partial", "partial_grad", "context.sequence_parallel"),
        "1 group, dp2 tp2 zero1",
        "C18",
        culprit="gradient of the parameter decoder.layers.3.self_attention.?_layernorm",
    ),
    Defect(  # C19
        "gradients of shared keys and values are not summed over their holders",
        "data_parallel.early_sums:_sum_shared_ranges",
        without_call("all_reduce_"),
        "1 group, dp2 tp2 zero1",
        "C19",
        culprit="gradient of the parameter decoder.layers.3.self_attention.linear_qkv",
    ),
    # Collectives and their adjoints.
    Defect(  # C22
        "input gradient of a column-parallel layer is not reduced",
        "tensor_parallel.linear_comm:start_input_grad_reduction",
        call("start_all_reduce", "(FIRST, Done())"),
        "tp2",
        "C22",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(  # C22
        "input gradient under sequence parallel is split but not summed",
        "tensor_parallel.linear_comm:start_input_grad_reduction",
        call("start_reduce_scatter_sequence", "(FIRST.chunk(SECOND.size())[SECOND.rank()], Done())"),
        "tp2 sp",
        "C22",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "backward of the embedding's all-reduce is another all-reduce",
        "parallel.collectives:reduce_from_region",
        argument("paired", 3, "'sum'"),
        "tp2",
        culprit="gradient of the parameter embedding",
    ),
    Defect(
        "gradient of a row-parallel layer's output is summed over the ranks, too",
        "tensor_parallel.linear_comm:gather_output_grad",
        returned("_gathered(grad_y, comm) if comm.scatter_sequence else reduced_output(grad_y.clone(), comm)"),
        "tp2",
        culprit=(
            "gradient of the output of decoder.layers.3.mlp or "
            "gradient of the output of decoder.layers.3.pre_mlp_layernorm"
        ),
    ),
    Defect(
        "gradient of a scattered output is the rank's own part, repeated",
        "tensor_parallel.linear_comm:gather_output_grad",
        call("_gathered", "FIRST.repeat(SECOND.group.size(), 1, 1)"),
        "tp2 sp",
        culprit=(
            "gradient of the output of decoder.layers.3.mlp or "
            "gradient of the output of decoder.layers.3.pre_mlp_layernorm"
        ),
    ),
    Defect(
        "gradient of a scattered output is divided by the ranks",
        "tensor_parallel.linear_comm:gather_output_grad",
        call("_gathered", "OLD / SECOND.group.size()"),
        "tp2 sp",
        culprit=(
            "gradient of the output of decoder.layers.3.mlp or "
            "gradient of the output of decoder.layers.3.pre_mlp_layernorm"
        ),
    ),
    Defect(
        "reduce-scatter deals the sequence out in turn, the gather expects contiguous parts",
        "parallel.collectives:start_reduce_scatter_sequence",
        call("contiguous", "SELF.unflatten(0, (-1, group.size())).transpose(0, 1).flatten(0, 1).contiguous()"),
        "tp2 sp",
        culprit="output of embedding",
    ),
    Defect(  # C43
        "each rank adds the bias of a row-parallel layer",
        "tensor_parallel.layers:RowParallelLinear._product",
        call("product", "self.product(FIRST, SECOND, self.bias, self.comm) - self.bias"),
        "tp2",
        "C43",
        culprit="output of decoder.layers.0.self_attention",
    ),
    # Products that are pipelined with their communication.
    Defect(
        "the first part of a pipelined product is not summed over the ranks",
        "tensor_parallel.linear_comm:start_multiply_and_sum",
        call("append", "SELF.append(FIRST if SELF else Done())"),
        "tp2 in chunks",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the sum of an input gradient in parts is read before it is complete",
        "tensor_parallel.linear:_start_input_grad",
        call("start_multiply_and_sum", "(OLD[0], Done())"),
        "tp2 in chunks",
        culprit="gradient of the output of decoder.final_layernorm",
    ),
    Defect(
        "a part of the sequence is multiplied in the place of another",
        "tensor_parallel.linear_comm:multiply_arriving",
        argument("linear_into", 0, "outputs[next_owner]"),
        "tp2 sp in parts",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "a rank's part of the sequence lacks the products of the others",
        "tensor_parallel.linear_comm:_start_multiply_and_scatter",
        argument("SummedAfter", 1, "OLD[rank]"),
        "tp2 sp in parts",
        culprit="output of decoder.layers.0.self_attention",
    ),
    # Vocabulary, cross entropy.
    Defect(  # C21
        "second rank's part of the vocabulary begins one token early",
        "tensor_parallel.layers:VocabParallelEmbedding.__init__",
        assigned("self.vocab_start_index", "self.tp_index * (rows - 1)"),
        "tp2",
        "C21",
        culprit="output of embedding or initial weight embedding.word_embeddings",
    ),
    Defect(  # C21
        "tokens of another rank look up row 0 here",
        "tensor_parallel.lookup:vocab_parallel_lookup",
        call("masked_fill", "SELF", number=2),
        "tp2",
        "C21",
        culprit="output of embedding",
    ),
    Defect(  # C21
        "targets are counted from one token too far",
        "tensor_parallel.cross_entropy:VocabularyLoss.of",
        expression("group.rank() * columns", "group.rank() * (columns + 1)"),
        "tp2",
        "C21",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(  # C21
        "padding of the vocabulary takes part in the softmax",
        "tensor_parallel.cross_entropy:VocabularyLoss.of",
        argument("cls", 2, "SECOND"),
        "tp2",
        "C21",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(  # C20
        "sums of exponentials are added although each is relative to its rank's largest logit",
        "tensor_parallel.cross_entropy:VocabularyLoss.joined",
        argument("tree_sum", 0, "exp_sum.unbind()"),
        "tp2",
        "C20",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(  # C20
        "sum of exponentials is each rank's own",
        "tensor_parallel.cross_entropy:VocabularyLoss.joined",
        call("tree_sum", "(exp_sum * (maximum - largest).exp())[self.group.rank()]"),
        "tp2",
        "C20",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(  # C20
        "the target's logit is that of the first rank, which has 0 for the targets of others",
        "tensor_parallel.cross_entropy:VocabularyLoss.joined",
        call("sum", "SELF[0]", number=1),
        "tp2",
        "C20",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(  # C50
        "cross entropy runs over the data-parallel group",
        "models.gpt.model:VocabularyHead.vocabulary",
        attribute("tp_group", "current().group('dp')"),
        "tp2",
        "C50",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(
        "loss is counted once for each tensor-parallel rank",
        "parallel.micro_batch:SequenceSplit.owns_loss",
        returned("True"),
        "tp2",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    # Weights: their parts and initialization.
    Defect(  # C42
        "gate and up projections are cut as one matrix",
        "transformer.mlp:MLP.__init__",
        expression("(ffn, ffn)", "(2 * ffn,)"),
        "geglu, tp2",
        "C42",
        culprit="output of decoder.layers.0.mlp or initial weight decoder.layers.0.mlp.linear_fc1",
    ),
    Defect(  # C42
        "queries, keys and values are cut as three matrices, used group by group",
        "parallel.sharding:split_qkv",
        argument(
            "replace", 0, "split_fused(FIRST, (heads * head_size, groups * head_size, groups * head_size), THIRD, size)"
        ),
        "tp2",
        "C42",
        culprit=(
            "output of decoder.layers.0.self_attention or initial weight decoder.layers.0.self_attention.linear_qkv"
        ),
    ),
    Defect(  # C19
        "ranks share key-value groups in turn instead of side by side",
        "parallel.sharding:split_qkv",
        expression("i // sharers", "i % groups"),
        "2 groups, tp4",
        "C19",
        culprit=(
            "output of decoder.layers.0.self_attention or initial weight decoder.layers.0.self_attention.linear_qkv"
        ),
    ),
    Defect(
        "each rank draws its own weights",
        "parallel.initialization:initialise_by_name",
        argument("_fill", 4, "OLD + dict(spec.indices)['tp']"),
        "tp2",
        culprit="initial weight ",
    ),
    Defect(  # C11
        "tied copy is drawn and named as a weight of its own",
        "models.gpt.model:GPTModel.__init__",
        argument("amend_spec", "is_copy", "False"),
        "pp2",
        "C11",
        culprit="initial weight output_layer or initial weight embedding.word_embeddings",
    ),
    # Dropout and positions.
    Defect(  # C24
        "every part of a split sequence has the positions of the first",
        "models.gpt.model:GPTModel.forward",
        argument("embedding", 1, "FIRST[:, :SELF.residual_length(FIRST.shape[1])]"),
        "tp2 sp",
        "C24",
        culprit="output of embedding",
    ),
    Defect(  # C27
        "every part of a split sequence has the dropout mask of the first",
        "models.gpt.model:GPTModel.forward",
        argument("SequenceContext", "residual_positions", "FIRST[:SELF.residual_length(len(FIRST))]"),
        "tp2 sp",
        "C27",
        culprit="output of embedding",
    ),
    Defect(  # C27
        "heads of every rank have the dropout masks of the first heads",
        "transformer.core_attention:CoreAttention.__init__",
        call("rank", "0", number=1),
        "tp2",
        "C27",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # C27
        "recomputation draws another dropout mask",
        "tensor_parallel.dropout:KeyedDropout.forward",
        argument("bias_dropout_add", 4, "OLD + (torch._C._current_graph_task_id() >= 0)"),
        "selective recompute, tp2",
        "C27",
        culprit=(
            "gradient of the output of decoder.layers.3.self_attention or "
            "gradient of the output of decoder.layers.3.input_layernorm or "
            "gradient of the parameter decoder.layers.3.self_attention"
        ),
    ),
    Defect(  # C54
        "dropout is keyed by the number of the layer on its stage",
        "transformer.block:TransformerBlock.__init__",
        argument("make", 1, "OLD - layers[0]"),
        "pp2",
        "C54",
        culprit="output of decoder.layers.2.",
    ),
    # Documents that share a sequence.
    Defect(  # C45
        "attention sees the documents before, without dropout",
        "transformer.core_attention:attention_by_documents",
        argument("zip", 3, "[(sum(document_lengths),) for document_lengths in OLD]"),
        "packed, modern, 2 groups, tp2 sp",
        "C45",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # C45
        "attention sees the documents before, with dropout",
        "transformer.core_attention:attention_by_documents",
        argument("zip", 3, "[[sum(document_lengths)] for document_lengths in OLD]"),
        "packed, tp2 sp",
        "C45",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # C27
        "every document has the attention dropout masks of the first positions",
        "transformer.core_attention:CoreAttention._by_blocks",
        statement(
            "key, value = self._of_every_head(query, key, value)",
            "span, (key, value) = TokenSpan(span.sample), self._of_every_head(query, key, value)",
        ),
        "packed, tp2 sp",
        "C27",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # C45
        "every sequence of a micro-batch is cut where the first one is",
        "parallel.micro_batch:MicroBatch.of",
        call("tolist", "SELF[:1].expand(len(SELF), -1).tolist()"),
        "packed, modern, dp2, micro-batches of 4",
        "C45",
        culprit="output of decoder.layers.0.self_attention or output of embedding",
    ),
    Defect(  # C45
        "end of a document belongs to the next one",
        "datasets.loader:_begins",
        expression("tokens[:, :-1]", "tokens[:, 1:]"),
        "packed, dp2",
        "C45",
        culprit="output of embedding",
    ),
    Defect(
        "learned positions do not restart",
        "datasets.loader:Packing.entries",
        attribute("reset_position_ids", "OLD and False"),
        "packed, dp2",
        culprit="output of embedding",
    ),
    Defect(
        "rotary positions do not restart",
        "training.step:model_step",
        attribute("position_ids", "None"),
        "positions restart, modern, dp2, micro-batches of 4",
        culprit="output of decoder.layers.0.self_attention",
    ),
)
