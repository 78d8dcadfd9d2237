"""Changes of the order or grouping of a sum, which ``--layout-invariant`` must not let pass.

Each is correct in exact arithmetic.
"""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import argument, assigned, attribute, call, condition, expression, statement

LINEAR, ATTENTION = "features.equal_bits.linear", "features.equal_bits.attention"
TREE, PRODUCTS, MIXTURE = "features.equal_bits.invariance", "features.equal_bits.fixed_products", "features.experts"
RUNNING = "[min(number, 1) for number in range(len(self.runs))]"
LEVEL = "[reduce(add, values[first : first + width]) for first in range(0, len(values), width)]"

IN_ORDERS = (
    Defect(
        "four ranks are added in the order of the transport",
        f"{TREE}:all_reduce_in_tree",
        condition("True", number=2),
        "tp4",
    ),
    Defect(
        "four ranks are reduce-scattered by the transport",
        f"{TREE}:reduce_scatter_in_tree",
        condition("False", number=2),
        "tp4 sp",
    ),
    Defect(
        "parts are added one after the other",
        "parallel.tree_sum:tree_sum",
        assigned("values", "[reduce(add, values)]", number=2),
        "tp2",
    ),
    Defect(
        "distant parts are added first",
        "parallel.tree_sum:tree_sum",
        assigned(
            "values", "[reduce(add, values[at::len(values) // width]) for at in range(len(values) // width)]", number=2
        ),
        "tp2",
    ),
    Defect(
        "input gradients are a running sum over parts",
        f"{LINEAR}:WeightParts.addends",
        argument("zip", 1, "[min(number, 1) for number in range(FIRST)] if self.splits_output else OLD"),
        "micro-batches of 2",
    ),
    Defect(
        "outputs are a running sum over parts",
        f"{LINEAR}:WeightParts.addends",
        argument("zip", 1, "OLD if self.splits_output else [min(number, 1) for number in range(FIRST)]"),
        "micro-batches of 2",
    ),
    Defect(
        "a part moves to the next place",
        f"{LINEAR}:WeightParts.even",
        call("range", "(*range(1, FIRST), 0)"),
        "micro-batches of 2",
    ),
    Defect(
        "a weight's gradient is one product for a sequence",
        f"{LINEAR}:_add_weight_grad",
        call("chunks_of", "[slice(0, FIRST)]"),
        "cp2 p2p",
    ),
    Defect(
        "a weight's gradient is one product for a micro-batch",
        f"{LINEAR}:_add_weight_grad",
        statement(
            "_add_products(exact_grad_of(weight), grad_y, x, chunks, weight_parts)",
            "size = x.shape[1]\ngrad_y, x = (of.flatten(0, 1).unsqueeze(1) for of in (grad_y, "
            "x))\nchunks = [(slice(at.start * size, at.stop * size), 0) for at, sample in chunks if "
            "sample == 0]\n_add_products(exact_grad_of(weight), grad_y, x, chunks, weight_parts)",
        ),
        "micro-batches of 2",
    ),
    Defect(
        "a bias is summed in float32",
        f"{LINEAR}:_add_bias_grad",
        call("add_rows_exactly_", "FIRST.add_(SECOND.sum(0))"),
        "dp2",
    ),
    Defect(
        "a row-parallel bias is summed in float32",
        f"{LINEAR}:_AddBias.backward",
        call("add_rows_exactly_", "FIRST.add_(SECOND.flatten(0, -2).sum(0))"),
        "tp2 sp",
    ),
    Defect(
        "tokens of a table's row are summed in float32",
        f"{LINEAR}:_Lookup.backward",
        statement(
            "exact_grad_of(ctx.weight).index_add_(0, local.flatten(), addends.flatten(0, -2))",
            "table = torch.zeros_like(ctx.weight)\ntable.index_add_(0, local.flatten(), "
            "addends.flatten(0, -2).to(table.dtype))\nexact_grad_of(ctx.weight).add_(table)",
        ),
        "micro-batches of 2",
    ),
    Defect(
        "sequences of a micro-batch share a row of positions",
        "features.equal_bits.arithmetic:ExactArithmetic.lookup_positions",
        argument("invariant_lookup", 0, "SELF"),
        "micro-batches of 2",
    ),
    Defect(
        "a norm's gradient is summed in float32",
        "features.equal_bits.arithmetic:_ExactNorm.backward",
        call("add_rows_exactly_", "FIRST.add_(SECOND.flatten(0, -2).sum(0))", number=1),
        "tp2 sp",
    ),
    Defect(
        "products are added from the last to the first",
        f"{PRODUCTS}:product_",
        call(
            "sum_of_products_",
            "sum_of_products_(FIRST, SECOND.flip(1), THIRD.flip(0), (InnerRange(0, 0, SECOND.shape[1], 0),), rows)",
        ),
        "experts, ep2",
    ),
    Defect(
        "chunks are paired with their neighbours' partners",
        f"{ATTENTION}:_ChunkedAttention.backward",
        argument("zip", 0, "[*by_chunk[1:half], by_chunk[0]]", number=2),
        "cp2 p2p",
    ),
    Defect(
        "pairs of chunks are added one after the other",
        f"{ATTENTION}:_ChunkedAttention.backward",
        call("tree_sum", "[SECOND(FIRST[0], other) for other in FIRST[1:]][-1]"),
        "micro-batches of 2",
    ),
    Defect(
        "exponentials are summed by torch",
        "tensor_parallel.cross_entropy:VocabularyLoss.joined",
        call("tree_sum", "(exp_sum * (maximum - largest).exp()).flip(0).cumsum(0)[-1]"),
        "tp2",
    ),
    Defect(
        "losses are summed in float32",
        "training.objective:Objective.step_loss",
        call("loss_sum", "FIRST.sum().double()"),
        "dp2",
    ),
    Defect(
        "the norm is a sum of the shards' sums",
        "optimizer.clip:GradientNorm.compute",
        attribute("adds_exactly", "False"),
        "dp2 zero1",
    ),
    Defect(
        "buckets are summed in float32",
        "data_parallel.buffer:Bucket.start_reduce",
        call("to", "SELF.float()"),
        "dp4",
    ),
    Defect(
        "choices are summed by torch",
        f"{MIXTURE}.dispatch:_total_of_choices",
        call("reduce", "slots.flip(1).cumsum(1)[:, -1]"),
        "experts, dp2 etp2 ep2",
    ),
    Defect(
        "an expert's gradient is one product for a sequence",
        f"{MIXTURE}.dispatch:_by_number",
        expression("chunk", "8 * OLD"),
        "experts, ep2",
    ),
    Defect(
        "probabilities' gradients are summed whole",
        "features.equal_bits.arithmetic:_TimesProbs.backward",
        call("tree_sum", "products.sum(-1)"),
        "experts, ep2",
    ),
    Defect(
        "routed tokens have finer chunks",
        f"{TREE}:Invariance.over",
        argument("replace", "context_ranks", "self.context_ranks"),
        "experts, tp2 sp ep2 etp1",
    ),
    Defect(
        "the tiles of a chunk of queries are merged from the last to the first",
        f"{ATTENTION}:_ChunkedAttention.forward",
        call("tiles", "reversed(list(OLD))"),
        "cp2 p2p",
    ),
    Defect(
        "the optimizer rounds after each operation",
        "optimizer.algorithms:AdamW.update",
        argument("adamw_", "backend", "'reference'"),
        "dp2 zero1",
    ),
    Defect(
        "products are added without rounding",
        f"{PRODUCTS}:add_chunk_products_",
        argument("call", 13, "OLD * 2.0 ** (-40)"),
        "dp2 zero1",
    ),
    Defect(
        "the key part of all heads adds ranks before heads",
        "features.equal_bits.arithmetic:_RepeatForHeads.backward",
        call("all_reduce_in_tree", "tree_sum([all_reduce_in_tree(heads_grad, SECOND) for heads_grad in of_parts])"),
        "latent attention, tp2",
    ),
    Defect(
        "losses of later tokens are summed in float32",
        "features.multi_token.block:MultiTokenPredictionBlock.add_losses",
        argument("add_auxiliary_loss", 2, "FIRST.sum()"),
        "multi-token prediction, dp2",
    ),
)
