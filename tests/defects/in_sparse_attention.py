"""Defects of sparse attention: the choice of keys over ranks and documents, and the indexer's loss."""

from __future__ import annotations

from tests.defects.defect import Defect

CORE, MODULE = "features.sparse_attention.attention:SparseAttention", "features.sparse_attention.attention"
FIRST = "output of decoder.layers.0.self_attention"
INDEXER = "gradient of the parameter decoder.layers.*.self_attention.core_attention.indexer"

IN_SPARSE_ATTENTION = (
    # The choice of keys.
    Defect(
        "gathered keys are in the order of ranks",
        f"{MODULE}:_in_order",
        "gather_from_sequence(x, group)[places.argsort().to(x.device)]",
        "gather_from_sequence(x, group)",
        "sparse attention, cp2",
        "C24",
        culprit=FIRST,
    ),
    Defect(
        "queries of a part count from the start of the sequence",
        f"{CORE}.forward",
        "positions = context.positions",
        "positions = None",
        "sparse attention, cp2",
        culprit=FIRST,
    ),
    Defect(
        "queries of a sequence-parallel part have the positions of the first part",
        f"{CORE}._select",
        "self.split.residual(positions)",
        "positions[: len(index.query)]",
        "sparse attention, tp2 sp",
        culprit=FIRST,
    ),
    Defect(
        "index heads of a sequence-parallel part are rotated by the angles of the first part",
        f"{MODULE}:Indexer._rotated",
        "(self.split.residual(table) for table in context.rotary)",
        "(table[: len(x)] for table in context.rotary)",
        "sparse attention, tp2 sp",
        culprit=FIRST,
    ),
    Defect(
        "keys of earlier documents are selected",
        f"{MODULE}:_hidden",
        "(key_positions < first[..., None])",
        "(key_positions < 0)",
        "sparse attention, packed, cp2",
        "C45",
        culprit=FIRST,
    ),
    # The indexer's loss.
    Defect(
        "the loss compares with the attention of a rank's heads",
        f"{CORE}._target",
        "reduce_from_region(of_heads, self.tp_group)",
        "of_heads * self.tp_group.size()",
        "sparse attention, tp2",
        culprit=INDEXER,
    ),
    Defect(
        "the attention of sequence-parallel queries is that of a rank's heads",
        f"{CORE}._target",
        "reduce_scatter_to_sequence(of_heads.transpose(0, 1).contiguous(), self.tp_group).transpose(0, 1)",
        "of_heads.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()] * self.tp_group.size()",
        "sparse attention, tp2 sp",
        culprit=INDEXER,
    ),
    Defect(
        "the gradient of index keys is that of a rank's queries with sequence parallelism",
        f"{CORE}.forward",
        "gather_from_sequence(index.key, self.tp_group)",
        "gather_from_sequence(index.key, self.tp_group, partial_grad=False)",
        "sparse attention, tp2 sp",
        "C17",
        culprit=INDEXER,
    ),
    Defect(
        "the gradient of gathered keys is that of a rank's queries with context parallelism",
        f"{MODULE}:_in_order",
        "gather_from_sequence(x, group)[",
        "gather_from_sequence(x, group, partial_grad=False)[",
        "sparse attention, cp2",
        "C8",
        culprit="gradient",
    ),
    Defect(
        "the loss counts the tokens of the first sequence-parallel part",
        f"{CORE}._loss",
        "self.split.tp_rank if splits > 1 else 0",
        "0",
        "sparse attention, tp2 sp",
        culprit=INDEXER,
    ),
)
