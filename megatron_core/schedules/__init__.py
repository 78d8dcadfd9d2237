"""Pipeline schedules as data: actions, the table of schedules, checks. No torch."""

from typing import TYPE_CHECKING

from megatron_core.moved import old_names_of
from megatron_core.schedules.table import (
    Schedule,
    __getattr__,
    forward_only,
    interleaved,
    make_plan,
    one_f_one_b,
    schedules,
    training_schedules,
)

if not TYPE_CHECKING:
    __getattr__ = old_names_of(__name__, __getattr__)
