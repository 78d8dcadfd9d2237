"""Defects of sparse attention: the choice of keys over ranks and documents, and the indexer's loss."""

from __future__ import annotations

from tests.defects.defect import Defect
from tests.defects.patch import assigned, attribute, call, expression, returned

CORE, MODULE = "features.sparse_attention.attention:SparseAttention", "features.sparse_attention.attention"
FIRST = "output of decoder.layers.0.self_attention"
INDEXER = "gradient of the parameter decoder.layers.*.self_attention.core_attention.indexer"

IN_SPARSE_ATTENTION = (
    # The choice of keys.
    Defect(
        "gathered keys are in the order of ranks",
        f"{MODULE}:_in_order",
        returned("gather_from_sequence(x, group)", number=2),
        "sparse attention, cp2",
        "C24",
        culprit=FIRST,
    ),
    Defect(
        "queries of a part count from the start of the sequence",
        f"{CORE}.forward",
        attribute("positions", "None"),
        "sparse attention, cp2",
        culprit=FIRST,
    ),
    Defect(
        "queries of a sequence-parallel part have the positions of the first part",
        f"{CORE}._select",
        call("residual", "FIRST[:len(index.query)]"),
        "sparse attention, tp2 sp",
        culprit=FIRST,
    ),
    Defect(
        "index heads of a sequence-parallel part are rotated by the angles of the first part",
        f"{MODULE}:Indexer._rotated",
        call("residual", "FIRST[:len(x)]"),
        "sparse attention, tp2 sp",
        culprit=FIRST,
    ),
    Defect(
        "keys of earlier documents are selected",
        f"{MODULE}:_hidden",
        expression("first[..., None]", "0"),
        "sparse attention, packed, cp2",
        "C45",
        culprit=FIRST,
    ),
    # The indexer's loss.
    Defect(
        "the loss compares with the attention of a rank's heads",
        f"{CORE}._target",
        call("reduce_from_region", "FIRST * SECOND.size()"),
        "sparse attention, tp2",
        culprit=INDEXER,
    ),
    Defect(
        "the attention of sequence-parallel queries is that of a rank's heads",
        f"{CORE}._target",
        call(
            "transpose",
            "of_heads.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()] * self.tp_group.size()",
            number=2,
        ),
        "sparse attention, tp2 sp",
        culprit=INDEXER,
    ),
    Defect(
        "the gradient of index keys is that of a rank's queries with sequence parallelism",
        f"{CORE}.forward",
        call("gather_from_sequence", "gather_from_sequence(FIRST, SECOND, partial_grad=False)"),
        "sparse attention, tp2 sp",
        "C17",
        culprit=INDEXER,
    ),
    Defect(
        "the gradient of gathered keys is that of a rank's queries with context parallelism",
        f"{MODULE}:_in_order",
        call("gather_from_sequence", "gather_from_sequence(FIRST, SECOND, partial_grad=False)"),
        "sparse attention, cp2",
        "C8",
        culprit="gradient",
    ),
    Defect(
        "the loss counts the tokens of the first sequence-parallel part",
        f"{CORE}._loss",
        assigned("tp_rank", "0"),
        "sparse attention, tp2 sp",
        culprit=INDEXER,
    ),
)
