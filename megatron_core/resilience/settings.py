"""Settings of runs that survive failures, and of faults for tests."""

import re
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, BY_RULE, Condition, given, section, setting, without

RERUN = Condition("--rerun-mode validate_results", lambda run: run.value("rerun_mode") != "disabled")
NO_SPARE = given("recover_without_spare")
RECOVERY = Condition("--recover in-process", lambda run: run.value("recover") != "none")
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

    name: str
    """One of ``FAULTS``."""
    rank: int
    """The rank on which it occurs."""
    step: int
    """The iteration, counted from 1."""
    always: bool
    """Whether it also occurs in restarted runs."""

    @classmethod
    def of(cls, text: str) -> "Fault | None":
        """The fault described by ``text``; None if it describes none."""
        match = _FAULT.fullmatch(text)
        return cls(match[1], int(match[2]), int(match[3]), match[4] is not None) if match else None


@dataclass(frozen=True, kw_only=True)
@section()
class ElasticConfig:
    """Runs whose number of ranks may change."""

    elastic: bool = setting(False, when=BY_RULE)
    """With --save and --load: under torchrun --nnodes MIN:MAX a run continues with the available ranks. The largest
    number that fits layout and batch takes part; the others wait."""


@dataclass(frozen=True, kw_only=True)
@section()
class RecoveryConfig:
    """Recovery in the same processes."""

    recover: Literal["none", "in-process"] = setting("none", when=(c.TRAINING, c.SEVERAL_RANKS))
    """in-process: after the death, hang or error of a rank the other processes continue, and a new process takes its
    place; at most one step is repeated. Each process of the launcher supervises a training process, and each rank
    copies its state to host memory before every step."""
    recover_without_spare: bool = setting(False, needs=RECOVERY)
    """With --recover: start no new process for a rank that dies. Training continues with fewer data-parallel replicas,
    the same global batch and the same samples, until the rank joins again; with --outer-steps without the group of the
    rank."""
    recover_mirror: bool = setting(False, needs=NO_SPARE)
    """With --recover-without-spare: each rank also keeps a copy of another rank's state, of another host if there is
    one, so that the loss of a host loses no state."""
    recover_join: bool = setting(False, needs=NO_SPARE)
    """With --recover-without-spare: this process takes the place of the lost rank RANK of a running job, at its next
    step; with --outer-steps, when all ranks of its group are there."""


@dataclass(frozen=True, kw_only=True)
@section()
class LinkCheckConfig:
    """Checks of collectives and messages."""

    link_check_interval: int | None = setting(100, r.COUNT, when=c.SEVERAL_RANKS)
    """Steps between checks that collectives and messages between stages deliver what was sent, by checksums.
    Collectives inside CUDA graphs are not checked. None: no checks."""
    check_pipeline_messages: bool = setting(False, when=c.PIPELINE)
    """Check every message between pipeline stages, in all steps, by a checksum sent with it."""


@dataclass(frozen=True, kw_only=True)
@section()
class RerunConfig:
    """Steps that are computed again, to find wrong results."""

    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = setting(
        "disabled", needs=without("fp8_format"), when=c.TRAINING
    )
    """validate_results: compute a step with a suspicious result (loss or gradient norm not finite, or rejected as by
    --spike-factor) again, on the same and on other ranks, and report whether it is transient, persistent or correct; a
    persistent error ends the run. report_stats: compute every step twice and report differences."""
    replay_interval: int | None = setting(
        None, r.COUNT, needs=without("fp8_format"), when=(c.TRAINING, c.SEVERAL_DATA_RANKS)
    )
    """Number of steps between two in which each data-parallel replica also computes the samples of the next one, before
    the update. If their losses differ beyond rounding, the rank that computes wrong values is named; with --recover the
    step is repeated, and with --recover-without-spare and three replicas or more without this rank."""
    error_injection_rate: int = setting(0, r.COUNT_FROM_0, needs=RERUN)
    """With --rerun-mode: replace the loss of about one in this number of steps by NaN on some ranks, for tests; 0: of
    none."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = setting(
        "transient_error", needs=given("error_injection_rate", "N")
    )
    """Injected error. transient_error: in the first computation of the step. persistent_error: in all computations by
    the same ranks. correct_result: for the same samples on any rank."""


@dataclass(frozen=True, kw_only=True)
@section()
class FaultConfig:
    """Faults for tests."""

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
