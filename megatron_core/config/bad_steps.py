"""Settings of bad steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import section, setting


@dataclass(frozen=True, kw_only=True)
@section()
class BadStepConfig:
    """Bad steps."""

    max_bad_steps: int = setting(0, r.COUNT_FROM_0, when=c.TRAINING)
    """Number of consecutive bad steps (loss or gradient norm not finite, or a spike) that are skipped. After one more
    the run loads its last checkpoint and omits the batches of these steps. 0: the first bad step is an error."""
    max_rollbacks: int = setting(3, r.COUNT_FROM_0, when=c.BAD_STEPS)
    """With --max-bad-steps: number of times that a run loads its last checkpoint before it ends with an error."""
    spike_factor: float | None = setting(None, r.POSITIVE, needs=c.BAD_STEPS)
    """With --max-bad-steps: a step is also bad if its gradient norm is larger than this factor times the median of the
    last 64 good steps."""
    save_bad_steps: int = setting(1, r.COUNT_FROM_0, when=c.SAVE)
    """With --save: number of bad steps whose weights and samples are stored in bad_steps, for megatron-replay-step."""
    iterations_to_skip: tuple[int, ...] = setting((), when=c.TRAINING)
    """Iterations whose batches are skipped."""
