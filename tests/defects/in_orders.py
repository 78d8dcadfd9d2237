"""Changes of the order or grouping of a sum, which ``--layout-invariant`` must not let pass.

Each is correct in exact arithmetic.
"""

from __future__ import annotations

from tests.defects.defect import Defect

LINEAR, ATTENTION = "features.equal_bits.linear", "features.equal_bits.attention"
TREE, PRODUCTS, MIXTURE = "features.equal_bits.invariance", "features.equal_bits.fixed_products", "transformer.moe"
RUNNING = "[min(number, 1) for number in range(len(self.runs))]"
LEVEL = "[reduce(add, values[first : first + width]) for first in range(0, len(values), width)]"

IN_ORDERS = (
    Defect(
        "four ranks are added in the order of the transport",
        f"{TREE}:all_reduce_in_tree",
        "if size == 2:",
        "if True:",
        "tp4",
    ),
    Defect(
        "four ranks are reduce-scattered by the transport",
        f"{TREE}:reduce_scatter_in_tree",
        "if size > 2:",
        "if False:",
        "tp4 sp",
    ),
    Defect("parts are added one after the other", "parallel.tree_sum:tree_sum", LEVEL, "[reduce(add, values)]", "tp2"),
    Defect(
        "distant parts are added first",
        "parallel.tree_sum:tree_sum",
        LEVEL,
        "[reduce(add, values[at :: len(values) // width]) for at in range(len(values) // width)]",
        "tp2",
    ),
    Defect(
        "input gradients are a running sum over parts",
        f"{LINEAR}:WeightParts.addends",
        "additions(len(self.runs))",
        f"{RUNNING} if self.splits_output else additions(len(self.runs))",
        "micro-batches of 2",
    ),
    Defect(
        "outputs are a running sum over parts",
        f"{LINEAR}:WeightParts.addends",
        "additions(len(self.runs))",
        f"additions(len(self.runs)) if self.splits_output else {RUNNING}",
        "micro-batches of 2",
    ),
    Defect(
        "a part moves to the next place",
        f"{LINEAR}:WeightParts.even",
        "for i in range(count))",
        "for i in (*range(1, count), 0))",
        "micro-batches of 2",
    ),
    Defect(
        "a weight's gradient is one product for a sequence",
        f"{LINEAR}:_add_weight_grad",
        "weight_parts.invariance.chunks_of(x.shape[0])",
        "[slice(0, x.shape[0])]",
        "cp2 p2p",
    ),
    Defect(
        "a weight's gradient is one product for a micro-batch",
        f"{LINEAR}:_add_weight_grad",
        "_add_products(exact_grad_of(weight), grad_y, x, chunks, parts)",
        "size = x.shape[1]\n"
        "    grad_y, x = (of.flatten(0, 1).unsqueeze(1) for of in (grad_y, x))\n"
        "    chunks = [(slice(at.start * size, at.stop * size), 0) for at, sample in chunks if sample == 0]\n"
        "    _add_products(exact_grad_of(weight), grad_y, x, chunks, parts)",
        "micro-batches of 2",
    ),
    Defect(
        "a bias is summed in float32",
        f"{LINEAR}:_add_bias_grad",
        "add_rows_exactly_(total[slice(*rows)], grad_y[:, slice(*columns)], terms)",
        "total[slice(*rows)].add_(grad_y[:, slice(*columns)].sum(0))",
        "dp2",
    ),
    Defect(
        "a row-parallel bias is summed in float32",
        f"{LINEAR}:_AddBias.backward",
        "add_rows_exactly_(exact_grad_of(ctx.bias), grad, ctx.invariance.tokens)",
        "exact_grad_of(ctx.bias).add_(grad.flatten(0, -2).sum(0))",
        "tp2 sp",
    ),
    Defect(
        "tokens of a table's row are summed in float32",
        f"{LINEAR}:_Lookup.backward",
        "exact_grad_of(ctx.weight).index_add_(0, local.flatten(), addends.flatten(0, -2))",
        "table = torch.zeros_like(ctx.weight)\n"
        "        table.index_add_(0, local.flatten(), addends.flatten(0, -2).to(table.dtype))\n"
        "        exact_grad_of(ctx.weight).add_(table)",
        "micro-batches of 2",
    ),
    Defect(
        "sequences of a micro-batch share a row of positions",
        "features.equal_bits.arithmetic:ExactArithmetic.lookup_positions",
        "positions.expand(-1, batch)",
        "positions",
        "micro-batches of 2",
    ),
    Defect(
        "a norm's gradient is summed in float32",
        "features.equal_bits.arithmetic:_ExactNorm.backward",
        "add_rows_exactly_(exact_grad_of(norm.weight), scaled.mul_(grad), ctx.terms)",
        "exact_grad_of(norm.weight).add_(scaled.mul_(grad).flatten(0, -2).sum(0))",
        "tp2 sp",
    ),
    Defect(
        "products are added from the last to the first",
        f"{PRODUCTS}:product_",
        "sum_of_products_(out, x, matrix, (InnerRange(0, 0, x.shape[1], 0),), rows)",
        "sum_of_products_(out, x.flip(1), matrix.flip(0), (InnerRange(0, 0, x.shape[1], 0),), rows)",
        "experts, ep2",
    ),
    Defect(
        "chunks are paired with their neighbours' partners",
        f"{ATTENTION}:_ChunkedAttention.backward",
        "zip(by_chunk[:half],",
        "zip([*by_chunk[1:half], by_chunk[0]],",
        "cp2 p2p",
    ),
    Defect(
        "pairs of chunks are added one after the other",
        f"{ATTENTION}:_ChunkedAttention.backward",
        "tree_sum(pairs, _add_shorter)",
        "[_add_shorter(pairs[0], other) for other in pairs[1:]][-1]",
        "micro-batches of 2",
    ),
    Defect(
        "exponentials are summed by torch",
        "tensor_parallel.cross_entropy:VocabularyLoss.joined",
        "tree_sum((exp_sum * (maximum - largest).exp()).unbind())",
        "(exp_sum * (maximum - largest).exp()).flip(0).cumsum(0)[-1]",
        "tp2",
    ),
    Defect(
        "losses are summed in float32",
        "training.objective:Objective.step_loss",
        "arithmetic.loss_sum(losses)",
        "losses.sum().double()",
        "dp2",
    ),
    Defect(
        "the norm is a sum of the shards' sums",
        "optimizer.clip:GradientNorm.compute",
        "if self.arithmetic.adds_exactly:",
        "if False:",
        "dp2 zero1",
    ),
    Defect(
        "buckets are summed in float32",
        "data_parallel.buffer:Bucket.start_reduce",
        "self.grads.to(self.wire_dtype)",
        "self.grads.float()",
        "dp4",
    ),
    Defect(
        "choices are summed by torch",
        f"{MIXTURE}.dispatch:_total_of_choices",
        "reduce(torch.add, (tree_sum(choice.unbind(1)) for choice in slots.split(copies, 1)))",
        "slots.flip(1).cumsum(1)[:, -1]",
        "experts, dp2 etp2 ep2",
    ),
    Defect(
        "an expert's gradient is one product for a sequence",
        f"{MIXTURE}.dispatch:_by_number",
        "ascending[padding:] // chunk",
        "ascending[padding:] // (8 * chunk)",
        "experts, ep2",
    ),
    Defect(
        "probabilities' gradients are summed whole",
        "features.equal_bits.arithmetic:_TimesProbs.backward",
        "tree_sum(sums)",
        "products.sum(-1)",
        "experts, ep2",
    ),
    Defect(
        "routed tokens have finer chunks",
        f"{TREE}:Invariance.over",
        "self.context_ranks * ranks",
        "self.context_ranks",
        "experts, tp2 sp ep2 etp1",
    ),
    Defect(
        "the tiles of a chunk of queries are merged from the last to the first",
        f"{ATTENTION}:_ChunkedAttention.forward",
        "in sequence.tiles(chunk):",
        "in reversed(list(sequence.tiles(chunk))):",
        "cp2 p2p",
    ),
    Defect(
        "the optimizer rounds after each operation",
        "optimizer.algorithms:AdamW.update",
        "backend=self.backend",
        'backend="reference"',
        "dp2 zero1",
    ),
    Defect(
        "products are added without rounding",
        f"{PRODUCTS}:add_chunk_products_",
        "UNIT, largest_addend(terms)",
        "UNIT * 2.0**-40, largest_addend(terms)",
        "dp2 zero1",
    ),
    Defect(
        "the key part of all heads adds ranks before heads",
        "features.equal_bits.arithmetic:_RepeatForHeads.backward",
        "all_reduce_in_tree(tree_sum(of_parts), ctx.group)",
        "tree_sum([all_reduce_in_tree(heads_grad, ctx.group) for heads_grad in of_parts])",
        "latent attention, tp2",
    ),
    Defect(
        "losses of later tokens are summed in float32",
        "features.multi_token.block:MultiTokenPredictionBlock.add_losses",
        "self.arithmetic.loss_sum(of_depth)",
        "of_depth.sum()",
        "multi-token prediction, dp2",
    ),
)
