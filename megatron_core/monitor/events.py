"""Events of a run, one for each step and each evaluation, and the interface of their receivers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One optimizer step, taken or skipped. Values are of the whole job unless stated otherwise."""

    iteration: int
    """Number of the optimizer step, from 1, counted over the whole training with all resumed runs."""
    total_iterations: int
    """Optimizer steps of the whole training."""
    consumed_samples: int
    """Sequences read so far, including this step."""
    consumed_tokens: int
    """Tokens read so far, including this step."""
    loss: float
    """Mean loss over the tokens of this global batch; may be NaN or infinite."""
    learning_rate: float
    """Learning rate of this step."""
    global_batch_size: int
    """Sequences in this step."""
    loss_scale: float = 1.0
    """Factor of the loss before backward."""
    grad_norm: float | None = None
    """Global gradient norm before clipping; ``None`` if it was not computed."""
    params_norm: float | None = None
    """Norm of the weights at the start of the step, if requested."""
    num_zeros_in_grad: int | None = None
    """Number of gradient elements equal to 0, if requested."""
    elapsed_ms: float
    """Wall-clock milliseconds of this step."""
    tokens_per_second: float = 0.0
    """Tokens of this step / its time, over all ranks; 0 if unknown."""
    model_flops_per_second: float = 0.0
    """Mean model FLOP/s of a rank; 0 if unknown."""
    memory_bytes: int = 0
    """Peak memory of the reporting rank."""
    auxiliary_losses: Mapping[str, float] = field(default_factory=dict)
    """Means of the auxiliary losses of layers over this global batch, by name."""
    expert_load: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By layer with experts: how often each expert was chosen in this global batch, followed by the number of dropped
    choices (``ExpertLoad.of``)."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """By metric and part, such as ``grad-norm by layer/head`` or ``lm loss by source/web``."""
    skipped: bool = False
    """Whether the update was skipped, for example because gradients were not finite."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the reporting rank in this step by phase and by kind of collective (``reports.meter``)."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the reporting rank by kind."""
    goodput: float | None = None
    """Share of the time since the first start in which training made progress."""
    product_rate: float | None = None
    """FLOP/s of matrix products on the reporting rank, from ``--peak-tflops`` or measured."""
    layout: str | None = None
    """The layout, such as ``tp2 pp2 dp1``; plots mark where it changes."""

    @property
    def utilisation(self) -> float | None:
        """Model FLOP/s / FLOP/s of matrix products (Chowdhery et al. 2022, appendix B), if known."""
        return self.model_flops_per_second / self.product_rate if self.product_rate else None

    @property
    def is_nan(self) -> bool:
        """Whether the loss is not finite."""
        return not math.isfinite(self.loss)


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    """One evaluation."""

    iteration: int
    """Number of optimizer steps before it."""
    loss: float
    """Mean loss over all evaluated tokens."""
    consumed_samples: int = 0
    """Training sequences read so far."""
    consumed_tokens: int = 0
    """Training tokens read so far."""
    split: str = "validation"
    """The evaluated split: ``validation``, ``test``, ``validation NAME``, or the name of a file of questions."""
    accuracy: float | None = None
    """Share of multiple-choice questions whose most likely choice is correct; their ``loss`` is the mean negative
    log-likelihood of the correct choice."""
    accuracy_norm: float | None = None
    """As ``accuracy``, with the log-likelihood per character, without a space at the beginning of a choice."""

    @property
    def perplexity(self) -> float:
        """exp(min(loss, 20)), as in Megatron-LM, which limits the number of digits."""
        return math.nan if math.isnan(self.loss) else math.exp(min(self.loss, 20.0))

    @property
    def scalars(self) -> dict[str, float]:
        """The values by their names in logs."""
        losses = {f"lm loss {self.split}": self.loss, f"lm loss {self.split} ppl": self.perplexity}
        shares = {"accuracy": self.accuracy, "accuracy norm": self.accuracy_norm}
        return losses | {f"{name} {self.split}": share for name, share in shares.items() if share is not None}


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one layer in one step, over the whole global batch."""

    tokens: tuple[int, ...]
    """Number of times each expert was chosen; the sum is T k for T tokens with k choices each."""
    dropped: int
    """Number of choices dropped because the expert was at capacity."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "ExpertLoad":
        """Create from the number for each expert, followed by the number of dropped choices."""
        return cls(tuple(numbers[:-1]), numbers[-1])

    @property
    def mean(self) -> float:
        """Mean number of tokens of an expert."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def max_over_mean(self) -> float:
        """Largest load / mean load: 1 if all are equal, the number of experts if one expert gets all tokens."""
        return max(self.tokens) / self.mean if self.mean else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the shares / entropy of equal shares: 1 if all are equal, 0 if one expert gets all tokens."""
        shares = [n / sum(self.tokens) for n in self.tokens if n]
        if not shares or len(self.tokens) == 1:
            return 1.0
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens))

    def record(self) -> dict[str, Any]:
        """Return the fields of the JSON record."""
        return {
            "tokens": list(self.tokens),
            "dropped": self.dropped,
            "max_over_mean": self.max_over_mean,
            "entropy": self.entropy,
        }


class Sink(Protocol):
    """Receives the events of a run; only the reporting rank has sinks."""

    setting: str
    """Name of the setting with the destination."""

    def on_step(self, event: StepEvent) -> None:
        """Receive one step."""

    def on_validation(self, event: ValidationEvent) -> None:
        """Receive one evaluation."""

    def close(self) -> None:
        """Write pending events and close files; no event follows."""
