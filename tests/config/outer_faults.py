"""Faulty settings of groups of replicas, in the form of ``faults.FAULTS``."""

from __future__ import annotations

from typing import Any

GROUPS = {"outer_steps": 2}

OUTER_FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({"outer_groups": 4}, 4, ("outer_groups=4", "--outer-steps N")),
    (GROUPS | {"outer_groups": 3}, 4, ("outer_groups=3", "4 data-parallel copies", "1, 2, 4")),
    (GROUPS | {"outer_groups": 4}, 2, ("outer_groups=4", "2 data-parallel copies", "1, 2")),
    (GROUPS | {"outer_fragments": 3}, 2, ("outer_fragments=3", "1 to 2")),
    (GROUPS | {"outer_delay": 2}, 2, ("outer_delay=2", "outer_steps=2", "0 to 1")),
    (GROUPS | {"outer_alpha": 1.0}, 2, ("outer_alpha=1.0", "< 1")),
    (GROUPS | {"fp16": True}, 2, ("outer_steps=2", "fp16=True", "--bf16")),
    (GROUPS | {"fp8_format": "e4m3", "bf16": True}, 2, ("outer_steps=2", "fp8_format=e4m3")),
    (GROUPS | {"ema_decay": 0.99}, 2, ("outer_steps=2", "ema_decay=0.99")),
    (GROUPS | {"optimizer_offload_dir": "state"}, 2, ("outer_steps=2", "offload")),
    (GROUPS | {"grad_compression": "powersgd"}, 2, ("outer_steps=2", "grad_compression=powersgd", "--outer-exchange")),
    (GROUPS | {"lora_rank": 4}, 2, ("outer_steps=2", "lora_rank=4")),
    (GROUPS | {"rerun_mode": "validate_results"}, 2, ("outer_steps=2", "rerun_mode=validate_results")),
    (GROUPS | {"layout_invariant": True}, 2, ("outer_steps=2", "layout_invariant=True")),
    (
        GROUPS | {"zero_stage": 1, "num_distributed_optimizer_instances": 2},
        4,
        ("outer_steps=2", "num_distributed_optimizer_instances=2"),
    ),
]
