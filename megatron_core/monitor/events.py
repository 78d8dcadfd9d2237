"""What a run reports: an event for each step and each validation, and the interface of their receivers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One optimizer step, taken or skipped. Numbers are of the whole job unless stated otherwise."""

    iteration: int
    """Optimizer step, counted from 1 over the whole training, resumed runs included."""
    total_iterations: int
    """Optimizer steps of the whole training."""
    consumed_samples: int
    """Sequences read so far, this step's included."""
    consumed_tokens: int
    """Tokens read so far, this step's included."""
    loss: float
    """Mean loss over this global batch's tokens; NaN and infinity are legal and are shown."""
    learning_rate: float
    """Learning rate of this step."""
    global_batch_size: int
    """Sequences in this step."""
    loss_scale: float = 1.0
    """What the loss was multiplied by before backward."""
    grad_norm: float | None = None
    """Global gradient norm before clipping; ``None`` where it was not computed."""
    params_norm: float | None = None
    """Norm of the weights that the step began with, if asked for."""
    num_zeros_in_grad: int | None = None
    """Elements of the gradient that are 0, if asked for."""
    elapsed_ms: float
    """Wall-clock milliseconds of this step."""
    tokens_per_second: float
    """Tokens of this step by its time, over all ranks."""
    model_flops_per_second: float
    """Model FLOPs by time, of one rank on average."""
    memory_bytes: int = 0
    """Peak memory of the reporting rank."""
    auxiliary_losses: Mapping[str, float] = field(default_factory=dict)
    """Means of the losses that layers add, over this global batch, by name."""
    expert_load: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By layer with experts: how often each of them was chosen in this global batch, and, last, how many choices were
    dropped (``monitor.expert_load``)."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """By metric and part, as ``grad-norm by layer/head``, ``params-norm by layer/head``, ``lm loss by source/web``."""
    skipped: bool = False
    """Whether the weights were left as they were because gradients were not finite."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the reporting rank in this step by phase and by kind of collective (``parallel.meter``)."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the reporting rank by kind."""
    goodput: float | None = None
    """Share of the time since the first start in which training went forward."""
    product_rate: float | None = None
    """FLOP/s of matrix products on the reporting rank, given or measured."""
    layout: str | None = None
    """The layout, such as ``tp2 pp2 dp1``; plots mark where it changes."""

    @property
    def utilisation(self) -> float | None:
        """Model FLOP/s over the rate of matrix products (Chowdhery et al. 2022, appendix B), if that is known."""
        return self.model_flops_per_second / self.product_rate if self.product_rate else None

    @property
    def is_nan(self) -> bool:
        """Whether the loss is not finite."""
        return not math.isfinite(self.loss)


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    """One evaluation."""

    iteration: int
    """Optimizer steps taken before it."""
    loss: float
    """Mean loss over all evaluated tokens."""
    consumed_samples: int = 0
    """Training sequences read so far."""
    consumed_tokens: int = 0
    """Training tokens read so far."""
    split: str = "validation"
    """Which split was read: ``validation`` or ``test``."""

    @property
    def perplexity(self) -> float:
        """exp(loss), with the loss cut at 20 as in Megatron-LM so that it stays printable."""
        return math.nan if math.isnan(self.loss) else math.exp(min(self.loss, 20.0))


class Sink(Protocol):
    """Takes the events of a run; only the rank that reports has any."""

    setting: str
    """The setting that names where it writes."""

    def on_step(self, event: StepEvent) -> None:
        """Take one step."""

    def on_validation(self, event: ValidationEvent) -> None:
        """Take one evaluation."""

    def close(self) -> None:
        """Write what is left and close files; no event follows."""
