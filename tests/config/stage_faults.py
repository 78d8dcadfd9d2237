"""Faults of settings that assign layers to stages, as rows of ``tests.config.faults``."""

from __future__ import annotations

from typing import Any

PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


def laid_out(text: str, **others: Any) -> dict[str, Any]:
    """A layout of four layers on two ranks unless ``others`` change it."""
    return {"num_layers": 4, "pipeline_model_parallel_layout": text} | PP2 | others


STAGE_FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    # a layout that cannot be read
    (laid_out("Ett|dtL"), 2, ("pipeline_model_parallel_layout=Ett|dtL", "'d' at position 5", "E (embedding)")),
    (laid_out("E(tt|ttL"), 2, ("pipeline_model_parallel_layout=E(tt|ttL", "'(' at position 2", "add ')'")),
    (laid_out("Ett)|ttL"), 2, ("pipeline_model_parallel_layout=Ett)|ttL", "')' at position 4", "remove it")),
    (
        laid_out("Ett|ttmL"),
        2,
        ("pipeline_model_parallel_layout=Ett|ttmL", "multi-token", "mtp_num_layers=None", "write 0 m"),
    ),
    # a layout that does not match the model
    (laid_out("Ett|tL"), 2, ("=Ett|tL has 3 layers", "num_layers=4", "write 4 t, or give num_layers=3")),
    (laid_out("Ettt|ttL"), 2, ("=Ettt|ttL has 5 layers", "num_layers=4", "num_layers=5")),
    (laid_out("tt|ttL"), 2, ("=tt|ttL has 0 E (embedding)", "at the very beginning")),
    (laid_out("tEt|ttL"), 2, ("=tEt|ttL has 1 E (embedding)", "at the very beginning")),
    (laid_out("EtEt|ttL"), 2, ("=EtEt|ttL has 2 E (embedding)", "write one E")),
    (laid_out("|Ett|tt|L"), 2, ("=|Ett|tt|L has 1 E (embedding)", "at the very beginning")),
    (laid_out("Ett|tt"), 2, ("=Ett|tt has 0 L (output layer)", "at the very end")),
    (laid_out("Ett|tLt"), 2, ("=Ett|tLt has 1 L (output layer)", "at the very end")),
    (laid_out("Ett|tt|L|"), 2, ("=Ett|tt|L| has 1 L (output layer)", "at the very end")),
    # a layout that does not match the pipeline
    (
        laid_out("Ett|t|tL"),
        2,
        ("=Ett|t|tL has 3 stages", "size=2 cannot share", "2, 4, 6, ... stages", "pipeline_model_parallel_size=3"),
    ),
    (laid_out("EttttL"), 2, ("=EttttL has 1 stage,", "size=2 cannot share", "or pipeline_model_parallel_size=1")),
    (
        laid_out("Ett|ttL", pipeline_model_parallel_size=1),
        1,
        ("=Ett|ttL has 2 stages", "size=1 cannot share", "legal: 1 stage, or pipeline_model_parallel_size=2"),
    ),
    # a layout and another setting that also determines the stages
    *(
        (laid_out("E|tt|tt|L", **{name: value}), 2, ("=E|tt|tt|L", f"{name}={value}; keep"))
        for name, value in {
            "num_layers_per_virtual_pipeline_stage": 1,
            "num_virtual_stages_per_pipeline_rank": 2,
            FIRST: 2,
            LAST: 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }.items()
    ),
    # counts
    ({FIRST: 0, **PP2}, 2, (f"{FIRST}=0", "an integer >= 1")),
    ({LAST: -1, **PP2}, 2, (f"{LAST}=-1", "an integer >= 1")),
    ({FIRST: 1}, 1, (f"{FIRST}=1", "pipeline_model_parallel_size=1", "raise it to 2 or more")),
    (
        {"num_layers": 6, FIRST: 4, LAST: 3, **PP4},
        4,
        (f"{FIRST}=4 and {LAST}=3 of num_layers=6", "less than none", "legal: 2, 4 in all"),
    ),
    ({"num_layers": 6, FIRST: 5, **PP4}, 4, (f"{FIRST}=5 of num_layers=6", "1 for 3 other ranks", "legal: 3")),
    ({"num_layers": 7, LAST: 3, **PP4}, 4, (f"{LAST}=3 of num_layers=7", "4 for 3 other ranks", "legal: 1, 4")),
    (
        {"num_layers": 6, FIRST: 2, LAST: 3, **PP2},
        2,
        (f"{FIRST}=2 and {LAST}=3", "num_layers=6 leaves 1 for no other rank", "legal: 6 in all"),
    ),
    (
        {"num_layers": 10, FIRST: 3, "num_virtual_stages_per_pipeline_rank": 2, **PP2},
        2,
        (f"{FIRST}=3 cannot be split over num_virtual_stages_per_pipeline_rank=2", "multiples of 2"),
    ),
    (
        {"num_layers": 9, FIRST: 2, "num_virtual_stages_per_pipeline_rank": 2, **PP2},
        2,
        (f"{FIRST}=2 of num_layers=9", "7 for 1 other rank of 2 chunks", "num_layers to a multiple of 2"),
    ),
    *(
        (
            {"num_layers": 8, FIRST: 4, name: value, **PP2},
            2,
            (f"{FIRST}=4", f"{name}={value}; keep"),
        )
        for name, value in {
            "num_layers_per_virtual_pipeline_stage": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }.items()
    ),
    (
        {"num_layers": 14, FIRST: 4, "num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_size": 3},
        3,
        (f"{FIRST}=4 of num_layers=14", "10 for 2 other ranks of 2 chunks", "legal: 2, 6, 10"),
    ),
    # modules that count as a layer
    (
        {
            "num_layers": 5,
            "account_for_loss_in_pipeline_split": True,
            **PP4,
            **{"num_virtual_stages_per_pipeline_rank": 2},
        },
        4,
        ("num_layers=5", "8 stages", "legal: 7 or more"),
    ),
    (
        {
            "num_layers": 12,
            "account_for_loss_in_pipeline_split": True,
            "num_layers_per_virtual_pipeline_stage": 2,
            **PP2,
        },
        2,
        ("num_layers_per_virtual_pipeline_stage=2", "(num_layers + 1 accounted for)", "13 / 2"),
    ),
]
