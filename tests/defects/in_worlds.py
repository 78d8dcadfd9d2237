"""Defects that only worlds of 64 or more ranks show: arithmetic that is right for up to eight ranks on an axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.defects.patch import Patch, Text, argument, attribute, call, expression


@dataclass(frozen=True)
class WorldDefect:
    """A changed function, a large layout that must fail with it, and a small one that holds."""

    name: str
    """Title of the defect."""
    target: str
    """The function, ``module:Qualname`` inside the package."""
    patch: Patch | Text
    """The change of the function."""
    large: str
    """A layout of 64 or more ranks."""
    small: str
    """A layout of at most eight ranks on the same axes."""
    flags: dict[str, object] = field(default_factory=dict)
    """Further settings of the model."""
    culprit: str = ""
    """As in ``Defect``, or a failure of the large layout."""


EXPERTS = {
    "num_experts": 16,
    "moe_ffn_hidden_size": 16,
    "swiglu": True,
    "disable_bias_linear": True,
    "moe_aux_loss_coeff": 0.01,
}
IN_WORLDS = (
    # Groups.
    WorldDefect(
        "copies of experts are neighbours at most eight ranks apart",
        "parallel.grid:Grid._strides",
        call(
            "_strides_of",
            "{axis: min(stride, 8) if axis == 'edp' else stride for axis, stride in OLD.items()}",
            number=2,
        ),
        "dp32 ep16 pp2 zero1",
        "dp4 ep2 pp2 zero1",
        EXPERTS,
        culprit="*every rank belongs to one group",
    ),
    WorldDefect(
        "ranks of a group are sorted as texts",
        "parallel.grid:Grid._offsets",
        call("sorted", "sorted(FIRST, key=str)"),
        "tp8 pp8",
        "tp2 pp4",
        culprit="output of decoder.layers or *one whole model or deadlock",
    ),
    WorldDefect(
        "the embedding group of more than four stages ends one stage early",
        "parallel.groups:ParallelGroups.__init__",
        expression("pipeline[end]", "OLD - (len(pipeline) > 4 and end != 0)"),
        "tp8 pp8",
        "tp2 pp4",
        culprit="*tied weights are on the pipeline ranks",
    ),
    WorldDefect(
        "instances of more than eight ranks are joined to others",
        "parallel.groups:ParallelGroups._levels",
        expression("ranks[i::size]", "ranks[i::min(size, 8)]"),
        "dp64 zero1",
        "dp8 zero1",
        {"num_distributed_optimizer_instances": 4},
        culprit="deadlock: *in sum_over_instances",
    ),
    # Parts of tensors and sequences.
    WorldDefect(
        "the second part of a sequence is right on the first eight ranks alone",
        "parallel.micro_batch:zigzag",
        expression("2 * size - 1 - rank", "2 * size - 1 - min(rank, 7)"),
        "cp16 dp4",
        "cp8",
        culprit="output of embedding or output of decoder.layers.0.self_attention",
    ),
    WorldDefect(
        "dropout repeats after eight parts of a sequence",
        "parallel.micro_batch:SequenceSplit.residual",
        call("narrow", "SELF.narrow(FIRST, SECOND if SELF.dim() > 1 else self.tp_rank % 8 * THIRD, THIRD)"),
        "tp16 pp4 sp",
        "tp8 sp",
        {"hidden_dropout": 0.1},
        culprit="output of embedding",
    ),
    WorldDefect(
        "the vocabulary of ranks after the eighth begins too early",
        "tensor_parallel.cross_entropy:VocabularyLoss.of",
        call("rank", "min(OLD, 8)"),
        "tp16 pp4",
        "tp8",
        culprit="*; the loss is wrong before it or the loss that is reported",
    ),
    WorldDefect(
        "each part of the experts is held by the ranks of another one, too",
        "features.experts.dispatch:Dispatcher.__init__",
        expression("part_of_rank == number", "part_of_rank % 8 == number % 8"),
        "dp16 ep16 pp4",
        "dp8 ep8",
        EXPERTS,
        culprit="output of decoder.layers.0.mlp or *dispatch",
    ),
    # Copies and shards.
    WorldDefect(
        "copies after the sixteenth read the samples of the first ones",
        "datasets.loader:BatchLoader._micro_batch",
        attribute("data_parallel_rank", "OLD % 16"),
        "dp64 zero1",
        "dp8 zero1",
        culprit="the samples of the step",
    ),
    WorldDefect(
        "every thirty-second copy counts in the norm",
        "data_parallel.buffer:Bucket.is_writer",
        call("rank", "OLD % 32", number=1),
        "dp64",
        "dp8",
        culprit="the gradient norm",
    ),
    WorldDefect(
        "buckets are padded for at most 32 shards",
        "data_parallel.bucket_layout:InOrder.place",
        attribute("end_multiple", "OLD if OLD <= 32 else 32"),
        "tp2 dp36 zero1",
        "tp2 dp4 zero1",
        culprit="*in start_reduce: LayoutError: a reduce-scatter",
    ),
    # Pipelines.
    WorldDefect(
        "stages after the eighth send up and down over one communicator",
        "pipeline_parallel.p2p:PipelineP2P.send",
        argument("_group", 0, "min(OLD, 8)"),
        "pp16 v2 tp4 sp",
        "pp8",
        culprit="deadlock*p2p or *message",
    ),
)
