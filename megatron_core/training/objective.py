"""The loss of a run: how the losses of tokens that the model computes become the loss of a step.

The plain objective is the mean over tokens. A feature may have another one (``Feature.objective``), such as preferences
and distillation, which compare the model with a frozen one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.feature import load_hook, used_features
from megatron_core.models.gpt.model import LogitLoss
from megatron_core.ops.rows import wide
from megatron_core.parallel.micro_batch import MicroBatch


class LossReport(Protocol):
    """Receives the values of a step that are reported in addition to its loss."""

    def add_losses(self, losses: Tensor, batch: MicroBatch) -> None:
        """Add a micro-batch's token losses ``[b, n]``; masked losses are 0."""

    def add_terms(self, terms: Tensor) -> None:
        """Add a micro-batch's terms of ``Objective.num_sums`` sums over all ranks."""


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step's micro-batches on this rank."""

    sum_losses: Callable[[int, Tensor], Tensor]
    """(number of a micro-batch, losses of its tokens ``[b, n]``) -> the sum of its losses, which is minimised."""
    logit_losses: Mapping[int, LogitLoss] = field(default_factory=dict)
    """Loss of the logits by micro-batch, instead of cross entropy."""
    router_replays: Mapping[int, Any] = field(default_factory=dict)
    """The experts of the tokens by micro-batch, instead of the choices of the routers."""


class Objective:
    """The mean loss over tokens; base class of ``Feature.objective``."""

    num_sums = 0
    """Number of additional sums over the global batch, which ``metrics`` reads."""

    def __init__(self, run: Any) -> None:
        """``run``: the ``Run``, with its model and groups."""
        self.run = run

    def count_terms(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Number of terms of the mean in this rank's micro-batches, a float64 scalar."""
        return count_tokens(batches)

    def step_loss(self, batches: Sequence[MicroBatch], report: LossReport | None = None) -> StepLoss:
        """The loss of ``batches``; called before the forward of a step or, without ``report``, of an evaluation."""
        arithmetic = self.run.data_parallel.settings.arithmetic

        def sum_losses(micro: int, output: Tensor) -> Tensor:
            losses = output * batches[micro].loss_mask
            if report is not None:
                report.add_losses(losses, batches[micro])
            return arithmetic.loss_sum(losses)

        return StepLoss(sum_losses)

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Values to report by name, from the global sums of ``LossReport.add_terms``; ``lm loss`` replaces the loss."""
        return {}


def count_tokens(batches: Sequence[MicroBatch]) -> Tensor:
    """Number of tokens with unmasked loss in this rank's micro-batches: a float64 scalar."""
    return torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in batches]).sum()


def log_probs(losses: Tensor, batch: MicroBatch) -> Tensor:
    """The sum of the log-probabilities of each sequence's counted tokens on this rank: ``[b, n]`` -> ``[b]``."""
    dtype = wide(losses.dtype)
    return -(losses.to(dtype) * batch.loss_mask.to(dtype)).sum(1)


def build_objective(config: RunConfig, run: Any) -> Objective:
    """Construct the objective of ``run``, a ``Run``. Errors: ``ConfigError`` if several features have one."""
    hooks = {feature.name: feature.objective for feature in used_features(config) if feature.objective is not None}
    if len(hooks) > 1:
        raise ConfigError(f"the features {', '.join(hooks)} each replace the loss; use only one of them")
    for hook in hooks.values():
        return load_hook(hook)(run)
    return Objective(run)
