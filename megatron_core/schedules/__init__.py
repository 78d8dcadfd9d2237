"""Pipeline schedules as data: actions, the table of schedules, checks. No torch."""

from megatron_core.schedules.table import (
    SCHEDULES,
    TRAINING,
    Schedule,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    make_plan,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
