"""Names of DeepSpeed's learning-rate schedules, and their arguments on the command line."""

import argparse
from typing import Any

from megatron_core.text_file import read_table

COS_MIN_RATIO = "cos_min_ratio"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_MAX_LR = "cycle_max_lr"
CYCLE_MAX_MOM = "cycle_max_mom"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
DECAY_LR_RATE = "decay_lr_rate"
DECAY_MOM_RATE = "decay_mom_rate"
DECAY_STEP_SIZE = "decay_step_size"
EDGE_VALUE = "edge_value"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_SCHEDULE = "lr_schedule"
MID_VALUE = "mid_value"
WARMUP_MIN_RATIO = "warmup_min_ratio"
WARMUP_TYPE = "warmup_type"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
TOTAL_NUM_STEPS = "total_num_steps"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"

_TUNING: dict[str, dict[str, tuple[Any, str]]] = read_table(__file__)
"""Default and help of the arguments of each schedule on the command line."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the arguments of all schedules to ``parser``."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", default=None, help="learning-rate schedule: one of the names in the JSON")
    for kind, arguments in _TUNING.items():
        for name, (default, text) in arguments.items():
            text = f"{kind}: {text}"
            if isinstance(default, bool):
                group.add_argument(f"--{name}", action="store_true", help=text)
            else:
                group.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the JSON section ``scheduler`` of the command line, or None and the reason."""
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None, "--lr_schedule not specified on command line"
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not supported LR schedule"
    names = [name for name in _TUNING.get(kind, _TUNING[WARMUP_LR]) if name != "cycle_momentum"]  # as in DeepSpeed
    if kind == WARMUP_COSINE_LR:
        names += [WARMUP_NUM_STEPS, "warmup_type"]
    values = {name: getattr(args, name, None) for name in names}
    return {"type": kind, "params": {name: value for name, value in values.items() if value is not None}}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return the highest learning rate of a JSON section ``scheduler``, or None and the reason."""
    for name in ("type", "params"):
        if name not in config:
            return None, f"LR schedule {name} not defined in config"
    kind = config["type"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a valid LR schedule"
    if kind == WARMUP_COSINE_LR:
        return None, f"{kind} scales the optimizer learning rate by a ratio, so its params define no lr"
    name = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(kind, WARMUP_MAX_LR)
    return config["params"][name], ""
