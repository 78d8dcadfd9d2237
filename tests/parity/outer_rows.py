"""Rows of the parity matrix with groups of replicas, in the form of ``rows.ROWS``."""

from __future__ import annotations

from tests.parity.context_rows import CP2
from tests.parity.moe_rows import EP2, MIXTRAL
from tests.parity.rows import OVERLAP, PP2, SMALL_BUCKETS, SP, TP2, UNTIED, ZERO, ZERO2, ZERO3

GROUPS = {"outer_steps": 2, "num_layers": 2}
EVERY = GROUPS | {"outer_steps": 1}
STREAMS = GROUPS | {"outer_fragments": 2, "outer_delay": 1, "outer_alpha": 0.25, "outer_momentum": 0.8}
SMALL = {"num_layers": 2, "global_batch_size": 4}

OUTER_ROWS: dict[str, tuple[int, dict, dict]] = {
    "2 groups": (2, GROUPS, {}),
    "2 groups of dp2": (4, GROUPS, SMALL_BUCKETS),
    "2 groups of tp2 sp": (4, GROUPS, TP2 | SP),
    "2 groups of pp2": (4, GROUPS, PP2),
    "2 groups of cp2": (4, GROUPS | SMALL, CP2),
    "2 groups of dp2 zero1": (4, GROUPS, ZERO | SMALL_BUCKETS),
    "2 groups of dp2 zero2": (4, GROUPS | UNTIED, ZERO2),
    "2 groups of dp2 zero3, overlap": (4, GROUPS, ZERO3 | OVERLAP | SMALL_BUCKETS),
    "2 groups of dp2 ep2": (4, GROUPS | MIXTRAL, EP2),
    "2 groups of dp2 ep2 zero1": (4, GROUPS | MIXTRAL, EP2 | ZERO),
    "4 groups": (4, GROUPS | {"outer_groups": 4, "outer_lr": 1.0}, {}),
    "streams, 2 groups": (2, STREAMS, {}),
    "streams, 2 groups of tp2": (4, STREAMS, TP2),
    "streams, 2 groups of pp2": (4, STREAMS, PP2),
    "streams, 2 groups of dp2 zero1, overlap": (4, STREAMS, ZERO | OVERLAP | SMALL_BUCKETS),
    "bf16, 2 groups of dp2 zero1": (4, EVERY | {"outer_exchange": "bf16"}, ZERO),
    "fp8, 2 groups of tp2": (4, EVERY | {"outer_exchange": "fp8"}, TP2),
    "fp4, 2 groups of dp2": (4, EVERY | {"outer_exchange": "fp4"}, {}),
    "fp4, streams, 2 groups of pp2": (4, STREAMS | {"outer_exchange": "fp4"}, PP2),
    "2 groups of muon, tp2": (4, GROUPS | {"optimizer": "muon"}, TP2),
    "2 groups with qk-clip, tp2": (4, GROUPS | {"qk_clip": True, "qk_clip_threshold": 0.5}, TP2),
}
