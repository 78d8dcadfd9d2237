"""Pipeline schedules: each a function that yields the ranks' lists of actions, and the table of all of them."""

from megatron_core.pipeline_parallel.schedules.in_order import forward_only, gpipe, interleaved, one_f_one_b
from megatron_core.pipeline_parallel.schedules.table import SCHEDULES, TRAINING, Schedule, make_plan
from megatron_core.pipeline_parallel.schedules.v_shaped import dualpipe_v, zb_v
from megatron_core.pipeline_parallel.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "TRAINING",
    "Schedule",
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_plan",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
