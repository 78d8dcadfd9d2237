"""What a run does when something goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FAULTS = ("kill", "exception", "hang", "nan", "slow", "disk-full", "truncated-write", "flip-bit")
"""What ``inject_fault`` can do."""
_FAULT = re.compile(rf"({'|'.join(FAULTS)})@(\d{{1,9}}):(\d{{1,9}})(:always)?")


@dataclass(frozen=True)
class Fault:
    """A fault to inject."""

    kind: str
    """One of ``FAULTS``."""
    rank: int
    """The rank that it happens on."""
    step: int
    """The iteration, counted from 1."""
    always: bool
    """In restarts, too."""

    @classmethod
    def of(cls, text: str) -> Fault | None:
        """The fault that a text names; None if it names none."""
        found = _FAULT.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3]), found[4] is not None) if found else None


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Bad steps, and faults to test what a run does about them."""

    max_bad_steps: int = 0
    """Steps in a row with a loss or gradient norm that is not finite, or with a spike, that are skipped; at one more
    the run goes back to its last checkpoint and leaves out the batches of these steps. 0: the first one is an error."""
    max_rollbacks: int = 3
    """With --max-bad-steps: how often a run goes back to a checkpoint before it ends with an error."""
    spike_factor: float | None = None
    """With --max-bad-steps: a step is bad, too, if its gradient norm is more than this many times the median of the
    last 64 good steps."""
    save_bad_steps: int = 1
    """With --save: bad steps of which the weights and samples are kept in bad_steps, for tools/replay_step.py."""
    elastic: bool = False
    """With --save and --load: under torchrun --nnodes MIN:MAX a run goes on with the ranks that there are. As many
    take part as the layout and the batch can be split over; the others wait."""
    iterations_to_skip: tuple[int, ...] = ()
    """Iterations whose batches are left out."""
    inject_fault: tuple[str, ...] = ()
    """Faults to inject, as KIND@RANK:STEP or, in restarts too, KIND@RANK:STEP:always. kill, exception, hang, nan (in
    the weights during the step), slow (a step of 5 s); for the checkpoint of the step: disk-full, truncated-write,
    flip-bit."""

    @property
    def faults(self) -> list[Fault]:
        """The faults to inject."""
        return [fault for text in self.inject_fault if (fault := Fault.of(text)) is not None]


def resilience_problems(config: ResilienceConfig, settings: Mapping[str, object]) -> Iterator[str]:
    """Faults that do not exist, and settings without effect; ``settings`` are all of the run by name."""
    for text in config.inject_fault:
        if Fault.of(text) is None:
            yield f"inject_fault={text} is none; legal: KIND@RANK:STEP, where KIND is {', '.join(FAULTS)}"
    on_disk = [fault.kind for fault in config.faults if fault.kind in FAULTS[5:]]
    if on_disk and settings["async_save"]:
        yield f"inject_fault={on_disk[0]} and async_save=True exclude one another; remove one of them"
    if config.elastic:
        yield from _elastic_problems(settings)
    if config.max_bad_steps and not settings["check_for_nan_in_loss_and_grad"]:
        yield (
            f"max_bad_steps={config.max_bad_steps} and check_for_nan_in_loss_and_grad=False exclude one another; "
            "remove one of them"
        )


def _elastic_problems(settings: Mapping[str, object]) -> Iterator[str]:
    """What a run cannot go on with or without, when the number of its ranks changes."""
    if settings["save"] is None or settings["load"] != settings["save"]:
        yield (
            f"elastic=True goes on from the run's own checkpoints, but save={str(settings['save'])[:200]} and "
            f"load={str(settings['load'])[:200]}; give both the same folder"
        )
    if settings["global_batch_size"] is None and settings["rampup_batch_size"] is None:
        yield (
            "elastic=True needs global_batch_size, which otherwise changes with the number of ranks; add "
            "--global-batch-size"
        )
    if settings["skip_train"]:
        yield "elastic=True has no effect with skip_train=True; remove one of them"
