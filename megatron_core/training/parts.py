"""A feature's objects in a training run, and the points of a step at which they act."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.feature import load_hook, used_features


class RunPart:
    """Base class of ``Feature.run_part``; override the methods you need.

    The constructor receives the ``Run``, with its model, optimizer and groups, after a checkpoint has been loaded. All
    methods are called on all ranks and may call collectives. ``train_step`` calls them, so that parts, in contrast to
    callbacks, also act in the steps of ``tools/verify_layout.py``.
    """

    def __init__(self, run: Any) -> None:
        """``run``: the ``Run`` that the part belongs to."""

    def notes(self) -> Iterator[str]:
        """Yield sentences that the first rank prints before training starts."""
        yield from ()

    def before_step(self) -> None:
        """Called before the forward of each step."""

    def metrics(self) -> Mapping[str, float]:
        """Return values to report with a step, by the name of the metric; called after the update."""
        return {}


def build_parts(config: RunConfig, run: Any) -> tuple[RunPart, ...]:
    """Construct the parts of the features that ``run``, a ``Run``, uses."""
    hooks = [feature.run_part for feature in used_features(config) if feature.run_part is not None]
    return tuple(load_hook(hook)(run) for hook in hooks)
