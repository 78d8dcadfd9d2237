"""Defects of context parallelism: split of sequences, merging of attention, gradients."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, assigned, call, condition, expression, returned, text, without_statement

IN_CONTEXT = (
    # Inputs of each rank.
    Defect(  # Megatron derives positions from ranks in several places
        "positions are those of contiguous parts, the tokens those of a zig-zag",
        "parallel.micro_batch:SequenceSplit.positions",
        call("zigzag", "[[i * FIRST // THIRD for i in (SECOND, SECOND + 1)]]"),
        "cp2 p2p",
        "C24",
        culprit="output of embedding",
    ),
    Defect(
        "positions begin at 0 on every context-parallel rank",
        "parallel.micro_batch:MicroBatch.of",
        argument("cls", "positions", "torch.arange(FIRST // SELF.cp_size, device=SECOND)"),
        "cp2 p2p",
        "C24",
        culprit="output of embedding",
    ),
    Defect(
        "positions that restart are not cut as the tokens are",
        "parallel.micro_batch:MicroBatch.of",
        call("local", "FIRST[:, :length // SELF.cp_size] if name == 'position_ids' else OLD"),
        "cp2 p2p, positions restart",
        "C24 C25",
        culprit="output of embedding or output of decoder.layers.0.self_attention",
    ),
    Defect(
        "labels are shifted after the cut",
        "parallel.micro_batch:MicroBatch.of",
        text("lengths = batch.get(", "entries['labels'] = entries['tokens'].roll(-1, 1)\n    lengths = batch.get("),
        "cp2 p2p",
        "C25",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(
        "loss masks are cut into contiguous parts",
        "parallel.micro_batch:MicroBatch.of",
        call("local", "FIRST.chunk(SELF.cp_size, 1)[SELF.cp_rank] if 'mask' in name else OLD"),
        "cp2 p2p",
        "C25",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(  # Megatron-LM's PR 7513, verl's issue 5983
        "each rank divides by its own number of tokens",
        "training.driver:forward_backward",
        argument("group", 0, "'dp'"),
        "cp2 dp2",
        "C3 C4",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    Defect(
        "gradients are not summed over the ranks of a sequence",
        "data_parallel.settings:BucketKind.of",
        argument("cls", "replica_axes", "('dp',)"),
        "cp2 p2p",
        "C4",
        culprit="gradient of the parameter ",
    ),
    # Computation.
    Defect(
        "keys after a query are seen when they are on another rank",
        "features.context_parallelism.tiles:_of_pieces",
        condition("key.start != query.start", number=2),
        "cp2 p2p, fused",
        "C23",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "attention crosses documents",
        "features.context_parallelism.attention:SplitSequence.tiles_with",
        argument("tiles", 2, "None"),
        "cp2 p2p, packed",
        "C45",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the window is that of a rank's own tokens",
        "features.context_parallelism.attention:SplitSequence.tiles_with",
        argument("tiles", 3, "OLD if owner == rank else None"),
        "cp2 p2p, window",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # torch's operator gives a row without keys the log-sum-exp 0
        "rows without keys take part in the merge",
        "features.context_parallelism.tiles:_with_window",
        call("cut", "SELF", number=3),
        "cp2 p2p, window",
        "C23",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "parts of a softmax are added without their weights",
        "features.context_parallelism.products:merge_",
        argument("addcmul_", 1, "(part_lse - part_lse).exp_().unsqueeze(FIRST)"),
        "cp4 p2p, fused, 2 groups",
        "C23",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the log-sum-exp is that of the last part",
        "features.context_parallelism.products:merge_",
        argument("copy_", 0, "part_lse"),
        "cp4 p2p, fused, 2 groups",
        "C23",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(  # Transformer Engine's issue 1557
        "backward of a part takes the part's own softmax",
        "features.context_parallelism.attention:_SplitAttention.backward",
        assigned(
            "operands",
            "(grad[rows], query[rows], keys[read], values[read], *sequence.products.forward("
            "query[rows], keys[read], values[read], tile, owner))",
        ),
        "cp2 p2p, fused",
        "C23",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm"
        ),
    ),
    Defect(  # diffusers' issue 14265
        "backward begins with the keys that came last",
        "features.context_parallelism.attention:_SplitAttention.forward",
        argument("save_for_backward", 1, "block"),
        "cp2 p2p, fused",
        "C23",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm"
        ),
    ),
    Defect(
        "ring blocks are assigned to the next ranks instead of the previous ones",
        "features.context_parallelism.exchange:_from_own",
        returned("[(group.rank() + step) % group.size() for step in range(group.size())]"),
        "cp4 p2p, fused, 2 groups",
        "C23",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "the last ring step, which returns key gradients to their owner, is missing",
        "features.context_parallelism.exchange:RingExchange.backward",
        returned("contribution"),
        "cp2 p2p, fused",
        "C23",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm"
        ),
    ),
    Defect(
        "gradients of keys omit the contributions of earlier ranks",
        "features.context_parallelism.exchange:RingExchange.backward",
        without_statement("contribution += total"),
        "cp4 p2p, fused, 2 groups",
        "C23",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm"
        ),
    ),
    Defect(
        "gradients of gathered keys are each rank's own part",
        "features.context_parallelism.exchange:AllGatherExchange.backward",
        call("start_reduce_scatter_sequence", "(FIRST[SECOND.rank()][None], Done())"),
        "cp2 all_gather",
        "C22 C23",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm"
        ),
    ),
    # A number of ranks for each document.
    Defect(
        "parts of a document are in the reverse order of its ranks",
        "features.dynamic_context_parallelism.part:DividedDocuments._part",
        argument("replace", "cp_rank", "size - 1 - (OLD)"),
        "documents over cp2 dp2, gathered keys",
        "C24",
        culprit="not located",
    ),
    Defect(
        "dropout of a document begins at position 0",
        "features.dynamic_context_parallelism.part:DividedDocuments._part",
        argument("replace", "positions", "(OLD) - documents[0].start"),
        "documents over dp2",
        "C26",
        culprit="not located",
    ),
    Defect(
        "dropout of keys on other ranks begins at position 0",
        "features.context_parallelism.core_attention:ContextParallelAttention._products",
        assigned("start", "0"),
        "documents over dp2",
        "C26",
        culprit="not located",
    ),
    Defect(
        "padding of a document counts in the loss",
        "features.dynamic_context_parallelism.part:join_documents",
        call("pad", "pad(FIRST, SECOND, value=float(name == 'loss_mask'))"),
        "documents over dp2",
        "C3",
        culprit="not located",
    ),
    Defect(
        "positions of a document begin at 0 where they do not restart",
        "features.dynamic_context_parallelism.part:join_documents",
        call("clamp", "(OLD - positions.min())"),
        "documents over dp2, tp2 sp, positions of samples",
        "C24",
        culprit="not located",
    ),
    Defect(
        "documents whose last token does not count are left out",
        "features.dynamic_context_parallelism.part:SampleDocument.counts",
        call("any", "SELF[-1]"),
        "documents over dp2",
        "C3",
        culprit="not located",
    ),
    Defect(
        "documents of a rank see one another",
        "features.dynamic_context_parallelism.part:join_documents",
        condition("len(documents) > 99", number=1),
        "documents over dp4, fused, zero1, overlap",
        "C45",
        culprit="not located",
    ),
    Defect(
        "documents of several samples drop the channels of the first one",
        "features.dynamic_context_parallelism.part:DividedDocuments.__init__",
        assigned("self.drops", "False"),
        "documents over dp2",
        "C26",
        culprit="not located",
    ),
    Defect(
        "a rank attends to its own part of a document alone",
        "features.dynamic_context_parallelism.attention:DynamicAttention.forward",
        assigned("attention", "self.by_ranks['1']"),
        "documents over cp2 dp2, gathered keys",
        "C23",
        culprit="not located",
    ),
    # Exchange of heads.
    Defect(
        "tokens are put together in the order of ranks",
        "features.context_parallelism.exchange:HeadExchange._ascending",
        argument("cat", 0, "[by_rank.flatten(0, 1)]"),
        "cp2 a2a",
        "C24",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "copies of key-value heads go with other query heads",
        "features.context_parallelism.exchange:HeadExchange.to_heads",
        call("repeat_interleave", "SELF.repeat(1, 1, FIRST, 1)"),
        "cp4 a2a, fused, 2 groups",
        "C19",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "gradients of exchanged heads are not exchanged back",
        "parallel.collectives:exchange_parts",
        argument("paired", 3, "'identity'"),
        "cp2 a2a",
        "C22",
        culprit=(
            "gradient of the output of decoder.layers.1.self_attention or "
            "gradient of the output of decoder.layers.1.input_layernorm"
        ),
    ),
    # Dropout.
    Defect(
        "activations are dropped alike on every rank of a sequence",
        "models.gpt.model:GPTModel.forward",
        argument("SequenceContext", "residual_positions", "SELF.residual(FIRST - FIRST[0])"),
        "cp2 p2p",
        "C26",
        culprit="output of embedding",
    ),
    Defect(
        "weights are dropped as if all keys were the rank's own",
        "features.context_parallelism.core_attention:ContextParallelAttention._products",
        argument("_positions", 0, "self.exchange.group.rank()", number=2),
        "cp2 p2p",
        "C26",
        culprit="output of decoder.layers.0.self_attention",
    ),
    Defect(
        "exchanged heads are dropped as the first ones are",
        "transformer.core_attention:CoreAttention.__init__",
        expression(
            "context.tp_group.rank() * heads_over.size() + heads_over.rank()",
            "context.tp_group.rank() * heads_over.size()",
        ),
        "cp2 tp2 sp a2a, dropout",
        "C26 C27",
        culprit="output of decoder.layers.0.self_attention",
    ),
)
