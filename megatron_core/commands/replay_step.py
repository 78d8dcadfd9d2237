"""Repeat a recorded bad step in one process, and find the values that are not finite.

megatron-replay-step checkpoints/bad_steps/iter_0000041

Training stores the weights and the position in the data of its first --save-bad-steps bad steps. One process computes
the same step as any layout: if the loss is finite here, the cause is a rank, its hardware or its layout; if not, the
data or the weights. The exit status is 0 if loss and gradients are finite and 1 if not.
"""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("replay_step")

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from megatron_core.locations import location
from megatron_core.terminal import parse_flags


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Repeat a bad step recorded by training, in one process."""

    step: tyro.conf.Positional[str]
    """Folder of the step in bad_steps, in the --save folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, repeat the step and exit."""
    settings = parse_flags(ReplayFlags, args=arguments, description=__doc__)
    from megatron_core.resilience.replay import replay  # loads torch, which --help does not need

    return status_of(lambda: 0 if replay(location(settings.step)) else 1, failed=2)
