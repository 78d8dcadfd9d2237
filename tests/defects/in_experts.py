"""Defects of experts split over ranks, found in public frameworks."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import (
    argument,
    assigned,
    attribute,
    call,
    condition,
    constant,
    expression,
    statement,
    without_call,
)

IN_EXPERTS = (
    # Partial gradients.
    Defect(  # C17
        "router gradients are not summed over tensor-parallel ranks",
        "features.experts.router:TopKRouter.__init__",
        argument("partial", "partial_grad", "False"),
        "experts, tp2 sp ep2 etp1",
        "C17",
        culprit="gradient of the parameter *router",
    ),
    Defect(  # C17
        "gradients of the shared experts' gate are not summed over a split sequence",
        "features.experts.layer:SharedExperts.__init__",
        argument("replicated", "partial_grad", "False"),
        "bias and groups, tp2 sp ep2 etp1, recompute",
        "C17",
        culprit="gradient of the parameter *shared_experts.gate",
    ),
    Defect(  # C17
        "gradients of the products before dispatch are not summed over ranks with other tokens",
        "features.experts.layer:MoELayer._latent_projections",
        argument("DownProjection", "divided", "False", number=1),
        "latent experts, tp2",
        "C17",
        culprit="gradient of the parameter *fc1_latent_proj",
    ),
    Defect(  # C17
        "the product after combination is computed of the sum over ranks of all tokens",
        "features.experts.layer:MoELayer._latent_projections",
        argument("DownProjection", "divided", "False", number=2),
        "latent experts, tp2 sp ep2 etp1, recompute",
        "C17",
        culprit="gradient of the parameter *fc2_latent_proj",
    ),
    Defect(  # C7
        "gradients of experts are summed over the copies of dense layers",
        "features.experts.experts:Experts.__init__",
        argument("split_over", "replica_axes", "('dp', 'cp')"),
        "experts, dp4 ep2 zero1, overlap",
        "C7",
        culprit="gradient of the parameter *experts",
    ),
    Defect(  # C15
        "experts are treated as experts only where they are split over ep",
        "features.experts.experts:Experts.__init__",
        argument("split_over", "replica_axes", "OLD if ep[1] > 1 else ('dp', 'cp')"),
        "experts, etp2, allgather",
        "C15",
        culprit="gradient of the parameter *experts",
    ),
    Defect(  # C7
        "gradients of experts grow with their number of ranks",
        "features.experts.row_exchange:_FinishRows.backward",
        argument("begin", 0, "[grad * ctx.exchange._group.size() for grad in OLD]"),
        "experts, ep2",
        "C7",
        culprit=(
            "gradient of the output of decoder.layers.1.mlp or "
            "gradient of the output of decoder.layers.1.pre_mlp_layernorm"
        ),
    ),
    Defect(  # C12
        "gradients of tokens are read while they are on their way",
        "features.experts.row_exchange:_BeginRows.backward",
        call("finish", "SELF._results"),
        "shared experts while tokens travel, ep2",
        "C12",
        culprit=(
            "gradient of the output of decoder.layers.2.mlp or "
            "gradient of the output of decoder.layers.2.pre_mlp_layernorm"
        ),
    ),
    Defect(  # C12
        "gradients of experts' outputs are read while another micro-batch is computed",
        "features.experts.row_exchange:RowExchange.finish",
        attribute("_handles", "OLD if torch._C._current_graph_task_id() < 0 else ()", number=1),
        "experts, ep2, in pairs",
        "C12",
        culprit=(
            "gradient of the output of decoder.layers.1.mlp or "
            "gradient of the output of decoder.layers.1.pre_mlp_layernorm"
        ),
    ),
    Defect(
        "the outputs of a pair are sent in place of each other",
        "pipeline_parallel.executor:Executor.run",
        argument("zip", 0, "OLD[::-1]"),
        "bias and groups, dp2 pp2 ep2 dualpipe_v in pairs",
        culprit="output of decoder.layers or gradient of the output of decoder.layers",
    ),
    Defect(
        "the forward of a pair takes the gradients of its backward",
        "features.paired_passes.interleave:paired_turns",
        argument("zip", 1, "OLD[::-1]"),
        "bias and groups, dp2 pp2 ep2 dualpipe_v in pairs",
        culprit="output of decoder.layers or gradient of the output of decoder.layers",
    ),
    Defect(
        "input gradients of divided tokens are not summed over tensor-parallel ranks",
        "features.experts.layer:MoELayer.forward",
        call("copy_to_region", "FIRST"),
        "experts, tp2",
        culprit="gradient of the output of *layers.1.pre_mlp_layernorm",
    ),
    Defect(  # C8 C51
        "probabilities are gathered without a gradient",
        "features.experts.dispatch:AllGatherDispatcher.dispatch",
        attribute("probs", "OLD.detach()"),
        "experts, etp2, allgather",
        "C8 C51",
        culprit=(
            "gradient of the output of *layers.1.pre_mlp_layernorm or gradient of the parameter *layers.1.mlp.router"
        ),
    ),
    Defect(  # C33
        "weight gradients of experts that were put off are lost",
        "features.experts.grouped_linear:_GroupedLinear.backward",
        expression("lambda: gradients.of_weight(x)", "lambda: None"),
        "bias and groups, dp2 pp2 ep2 zb_v",
        "C33",
        culprit="gradient of the parameter *experts",
    ),
    # Placement of experts and rows.
    Defect(
        "all ranks of ep hold the first experts",
        "features.experts.experts:Experts.__init__",
        argument("split_over", 0, "split(FIRST, 0, 0, ep[1], axis='ep')"),
        "experts, ep2",
        culprit="output of decoder.layers.0.mlp or initial weight *experts",
    ),
    Defect(  # C42
        "gate and value of an expert are cut as one matrix",
        "features.experts.experts:Experts.__init__",
        argument("split_fused", 1, "(sum(OLD),)", number=1),
        "experts, tp2",
        "C42",
        culprit="output of decoder.layers.0.mlp or initial weight *experts",
    ),
    Defect(
        "rows from several ranks are taken in the order of ranks, not of experts",
        "features.experts.dispatch:AllToAll._by_expert",
        condition("True", number=1),
        "experts, ep2",
        culprit="output of decoder.layers.0.mlp",
    ),
    Defect(
        "all copies of a token go to the first of the ranks that share its expert",
        "features.experts.dispatch:AllToAll._holders_on",
        argument("copied_to", 0, "[own[:1] * len(own) for own in OLD]"),
        "experts, tp2",
        culprit="output of decoder.layers.0.mlp",
    ),
    Defect(
        "outputs of divided tokens are left on the ranks that computed them",
        "features.experts.layer:MoELayer.forward",
        call("reduce_from_region", "FIRST"),
        "experts, tp2",
        culprit="output of decoder.layers.0.mlp",
    ),
    Defect(
        "a token's outputs are added by the first rank that shares an expert alone",
        "features.experts.dispatch:AllGatherDispatcher.dispatch",
        call("reduce_scatter_to_sequence", "FIRST[SECOND.rank() * (local_rows + missing):]"),
        "experts, etp2, allgather",
        culprit="output of decoder.layers.0.mlp",
    ),
    # Balance.
    Defect(  # C6
        "each rank balances its own part of a sequence",
        "features.experts.balance:balancing_loss",
        without_call("all_reduce_", number=2),
        "experts, tp2 sp ep2 etp1",
        "C6",
        culprit=(
            "gradient of the parameter *router or gradient of the output of *pre_mlp_layernorm or "
            "gradient of the output of *.mlp"
        ),
    ),
    Defect(  # C6
        "choices of experts count once for each rank of a sequence",
        "features.experts.balance:balancing_loss",
        statement(
            "all_reduce_(counts_and_tokens, sequence_group)",
            "all_reduce_(counts_and_tokens, sequence_group); counts_and_tokens[..., :-1] *= sequence_group.size()",
        ),
        "experts, tp2 sp ep2 etp1",
        "C6",
        culprit=(
            "gradient of the parameter *router or gradient of the output of *pre_mlp_layernorm or "
            "gradient of the output of *.mlp"
        ),
    ),
    Defect(  # C6
        "the balance of a sequence counts those of other ranks, too",
        "features.experts.balance:balancing_loss",
        argument("all_reduce_", 1, "batch_group", number=2),
        "experts, dp2 tp2 ep2 zero1",
        "C6",
        culprit=(
            "gradient of the parameter *router or gradient of the output of *pre_mlp_layernorm or "
            "gradient of the output of *.mlp"
        ),
    ),
    Defect(  # C6
        "the balance of the global batch is each rank's own",
        "features.experts.balance:balancing_loss",
        without_call("all_reduce_", number=1),
        "balance of the global batch, tp2 sp",
        "C6",
        culprit=(
            "gradient of the parameter *router or gradient of the output of *pre_mlp_layernorm or "
            "gradient of the output of *.mlp"
        ),
    ),
    Defect(  # C5
        "accumulated counts are divided by the tokens of one micro-batch",
        "features.experts.balance:balancing_loss",
        call("counts_so_far", "torch.cat([OLD[:-1], SECOND[-1:]])"),
        "balance of the global batch, tp2 sp",
        "C5",
        culprit=(
            "gradient of the parameter *router or gradient of the output of *pre_mlp_layernorm or "
            "gradient of the output of *.mlp"
        ),
    ),
    Defect(  # C6
        "the balancing loss is reported for the first part of a sequence alone",
        "transformer.auxiliary_loss:AuxiliaryLosses.totals",
        condition("owns_loss"),
        "experts, tp2 sp ep2 etp1",
        "C6",
        culprit="report0.*loss",
    ),
    Defect(
        "the load is counted again where activations are computed again",
        "transformer.auxiliary_loss:MicroBatchAuxiliaryLosses.add_load",
        assigned(
            "self.step.loads[layer_number, self.micro]", "OLD + self.step.loads.get((layer_number, self.micro), 0)"
        ),
        "bias and groups, tp2 sp ep2 etp1, recompute",
        culprit="report0.*load",
    ),
    Defect(
        "experts are chosen or refused by each rank's part of a sequence",
        "features.experts.router:TopKRouter._whole_sequences",
        constant(1, "99", number=4),
        "capacity, tp2 ep2 etp1",
        culprit="output of decoder.layers.0.mlp",
    ),
    Defect(  # C26
        "jitter depends on the place in a rank's part of the sequence",
        "features.experts.router:TopKRouter._jittered",
        argument("uniform", 3, "torch.arange(len(OLD))"),
        "sinkhorn and jitter, tp2 sp ep2 etp1",
        "C26",
        culprit="output of decoder.layers.0.mlp",
    ),
    Defect(
        "biases of quantiles are those of each data-parallel rank",
        "features.experts.quantile:BalancingBiases.update",
        without_call("all_reduce_"),
        "quantiles, dp2 ep2 zero1",
        culprit="weight|bias|parameter",
    ),
    # Steps.
    Defect(  # C15
        "norm of each group of experts alone",
        "optimizer.clip:GradientNorm.__init__",
        argument("group", 0, "'etp-ep'"),
        "experts, dp4 ep2 zero1, overlap",
        "C15",
        culprit="the gradient norm",
    ),
    Defect(
        "sharded experts are gathered from the ranks of dense layers",
        "data_parallel.fill:make_buckets",
        call("join", "'dp-cp'", number=2),
        "experts, dp4 ep2 zero1, overlap",
        culprit="updated weight *experts or gradient of the parameter *experts",
    ),
)
