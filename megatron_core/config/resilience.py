"""Bad steps, elastic runs, and faults for tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, BY_RULE, section, setting

FAULTS_ON_DISK = ("disk-full", "disk-slow", "truncated-write", "flip-bit")
"""Faults of a checkpoint that ``inject_fault`` can cause."""
LINK_AXES = ("tp", "cp", "dp", "pp", "ep")
"""Axes over which ``inject_fault`` can damage a received tensor."""
LINK_DAMAGES = ("zeros", "shifted", "stale", "flipped")
"""Damages of a received tensor."""
LINK_DELAYS = ("delayed", "lost")
"""Faults of a transfer that arrives 2 s later, or never."""
FAULTS_ON_LINKS = tuple(f"{axis}-{fault}" for axis in LINK_AXES for fault in (*LINK_DAMAGES, *LINK_DELAYS))
DEATHS = ("kill", "kill-gradients", "kill-update", "kill-copy", "kill-save", "kill-recovery")
"""Deaths of a rank at points of a step: before it, with the sums of gradients, with the decision to update, while the
state is copied, before its checkpoint, and in a recovery."""
FAULTS_OF_RANKS = (*DEATHS, "exception", "hang", "stop", "nan", "slow", "wrong-numbers", "clock")
"""Faults of a rank before or during a step."""
FAULTS = (*FAULTS_OF_RANKS, *FAULTS_ON_LINKS, *FAULTS_ON_DISK)
"""All faults that ``inject_fault`` can cause."""
MOST_FAULTS = 62
"""Maximum number of faults of a run with ``recover``: bits of a signed 64-bit number."""
_FAULT = re.compile(rf"({'|'.join(FAULTS)})@(\d{{1,9}}):(\d{{1,9}})(:always)?")


@dataclass(frozen=True)
class Fault:
    """A fault to inject."""

    kind: str
    """One of ``FAULTS``."""
    rank: int
    """The rank on which it occurs."""
    step: int
    """The iteration, counted from 1."""
    always: bool
    """Whether it also occurs in restarted runs."""

    @classmethod
    def of(cls, text: str) -> Fault | None:
        """The fault described by ``text``; None if it describes none."""
        found = _FAULT.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3]), found[4] is not None) if found else None


@dataclass(frozen=True, kw_only=True)
@section()
class ResilienceConfig:
    """Bad steps, elastic runs, and faults for tests."""

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
    elastic: bool = setting(False, when=BY_RULE)
    """With --save and --load: under torchrun --nnodes MIN:MAX a run continues with the available ranks. The largest
    number that fits layout and batch takes part; the others wait."""
    recover: Literal["none", "in-process"] = setting("none", when=(c.TRAINING, c.SEVERAL_RANKS))
    """in-process: after the death, hang or error of a rank the other processes continue, and a new process takes its
    place; at most one step is repeated. Each process of the launcher supervises a training process, and each rank
    copies its state to host memory before every step."""
    recover_without_spare: bool = setting(False, needs=c.RECOVERY)
    """With --recover: start no new process for a rank that dies. Training continues with fewer data-parallel replicas,
    the same global batch and the same samples, until the rank joins again; with --outer-steps without the group of the
    rank."""
    recover_mirror: bool = setting(False, needs=c.NO_SPARE)
    """With --recover-without-spare: each rank also keeps a copy of another rank's state, of another host if there is
    one, so that the loss of a host loses no state."""
    recover_join: bool = setting(False, needs=c.NO_SPARE)
    """With --recover-without-spare: this process takes the place of the lost rank RANK of a running job, at its next
    step; with --outer-steps, when all ranks of its group are there."""
    iterations_to_skip: tuple[int, ...] = setting((), when=c.TRAINING)
    """Iterations whose batches are skipped."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = setting(
        "disabled", needs=c.NO_FP8, when=c.TRAINING
    )
    """validate_results: compute a step with a suspicious result (loss or gradient norm not finite, or rejected as by
    --spike-factor) again, on the same and on other ranks, and report whether it is transient, persistent or correct; a
    persistent error ends the run. report_stats: compute every step twice and report differences."""
    replay_interval: int | None = setting(None, r.COUNT, needs=c.NO_FP8, when=(c.TRAINING, c.SEVERAL_DATA_RANKS))
    """Number of steps between two in which each data-parallel replica also computes the samples of the next one, before
    the update. If their losses differ beyond rounding, the rank that computes wrong values is named; with --recover the
    step is repeated, and with --recover-without-spare and three replicas or more without this rank."""
    error_injection_rate: int = setting(0, r.COUNT_FROM_0, needs=c.RERUN)
    """With --rerun-mode: replace the loss of about one in this number of steps by NaN on some ranks, for tests; 0: of
    none."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = setting(
        "transient_error", needs=c.ERROR_INJECTION
    )
    """Injected error. transient_error: in the first computation of the step. persistent_error: in all computations by
    the same ranks. correct_result: for the same samples on any rank."""
    inject_fault: tuple[str, ...] = setting((), when=ALWAYS)
    """Faults to inject, as KIND@RANK:STEP or, in restarts too, KIND@RANK:STEP:always. kill, exception, hang, stop (by
    SIGSTOP), nan (in the weights during the step), slow (a step of 5 s),
    wrong-numbers (computed by the rank from this step on); deaths within a step: kill-gradients,
    kill-update, kill-save, and with --recover kill-copy (of the state) and kill-recovery (to the step before); for the
    checkpoint of the step: disk-full, truncated-write, flip-bit; in a tensor received over tp, cp, dp, pp or ep:
    tp-zeros, tp-shifted (by one element), tp-stale (the tensor before it), tp-flipped (one bit), tp-delayed (by 2 s),
    tp-lost (it never arrives)."""

    @property
    def faults(self) -> list[Fault]:
        """The faults to inject."""
        return [fault for text in self.inject_fault if (fault := Fault.of(text)) is not None]
