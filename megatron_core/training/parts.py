"""A feature's objects in a training run, and the points of a step at which they act."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_core.checkpoint import TensorBox
from megatron_core.config import RunConfig
from megatron_core.data_parallel import DataParallel
from megatron_core.datasets.loader import Batch
from megatron_core.feature import load_hook, used_features
from megatron_core.models import GPTModel
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.tokenizers import Tokenizer
from megatron_core.training.driver import StepOutcome


class RunPart:
    """Base class of ``Feature.run_part``; override the methods you need.

    The constructor receives the ``Run``, with its model, optimizer and groups, before a checkpoint is loaded. All
    methods are called on all ranks and may call collectives. ``train_step`` calls them, so that parts, in contrast to
    callbacks, also act in the steps of ``tools/verify_layout.py``.
    """

    def __init__(self, run: Any) -> None:
        """``run``: the ``Run`` that the part belongs to."""

    def descriptions(self) -> Iterator[str]:
        """Yield lines that describe the run, which the first rank prints before training starts."""
        yield from ()

    def notes(self) -> Iterator[str]:
        """Yield sentences that the first rank prints before training starts."""
        yield from ()

    divides_batches = False
    """Whether loaders read the batches of all data-parallel ranks, which ``micro_batches`` divides over the ranks."""

    def micro_batches(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step; their number may differ between ranks."""
        raise NotImplementedError("only a part with divides_batches divides them")

    def is_alone(self) -> bool:
        """Whether this rank's outer group takes the next step without reports from the other groups."""
        return False

    def before_step(self) -> None:
        """Called before the forward of each step."""

    def after_gradients(self) -> None:
        """Called when the gradients of a step are summed over all ranks, before they are clipped."""

    def after_step(self, outcome: StepOutcome) -> None:
        """Called after the update of each step, and after the counters of the run; ``outcome``: equal on all ranks."""

    def evaluated_weights(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Return contexts with the weights of an evaluation, by an addition to the names of its results.

        The context of "" replaces the weights of the model in evaluations; the others are evaluated afterwards.
        """
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Return values to report with a step, by the name of the metric; called after the update."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the part's state of training on this rank."""
        return 0

    # State in checkpoints. Its pieces need names of their own, such as "NAME.*".

    def stored_pieces(
        self, updated: Iterable[TensorBox], changing: Iterable[TensorBox], *, weights_only: bool
    ) -> tuple[Iterable[TensorBox], Iterable[TensorBox]]:
        """Return the pieces of this rank in a checkpoint, in place of the pieces without this part: those that change
        only in updates, and the others."""
        return updated, changing

    def stored_values(self) -> dict[str, Any]:
        """Return values to store with the tensors; JSON types."""
        return {}

    def copied_pieces(self, pieces: Iterable[TensorBox]) -> Iterable[TensorBox]:
        """As ``stored_pieces``, for a copy in host memory before a step, from which this rank may recover."""
        return pieces

    def copied_values(self) -> dict[str, Any]:
        """As ``stored_values``, for such a copy."""
        return self.stored_values()

    def pieces_to_load(self, reader: Any) -> Iterable[TensorBox]:
        """Return pieces that ``load_state`` fills from ``reader`` together with the optimizer."""
        return ()

    def load(self, config: RunConfig, reader: Any) -> bool:
        """Load the whole state of the run in place of ``load_state``, and return True; or do nothing and return False.

        ``reader``: an open checkpoint or copy; ``config``: the settings for loading it.
        """
        return False

    def after_load(self, config: RunConfig, reader: Any) -> None:
        """Called after ``load_state`` has loaded ``reader``: load the part's own state, or start at these weights."""


class Evaluation:
    """Base class of ``Feature.evaluation``."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None) -> None:
        """Read the data; called before the model is built."""

    def results(self, run: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Evaluate the model of ``run`` with its present weights; yield names and fields of ``ValidationEvent``.

        Called on all ranks whenever the validation data is evaluated.
        """
        yield from ()


class AddedWeights:
    """Base class of ``Feature.added_weights``: parameters that a feature adds to a model trained without them."""

    saved_alone = False
    """Whether checkpoints of the run contain only these parameters. All others are frozen: whenever the run starts, it
    loads them from --pretrained-checkpoint or --load-hf, or draws them."""

    saved_always = False
    """Whether checkpoints with only the parameters of another feature also contain these, because both are trained."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    def title(self) -> str:
        """Their name in messages, a plural."""
        raise NotImplementedError

    def contain(self, name: str) -> bool:
        """Whether a parameter, or a piece of a checkpoint, is one of them, by its name."""
        raise NotImplementedError

    def are_missing(self, stored: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with the settings ``stored`` is of the same model without them."""
        return False

    def replace(self, name: str) -> bool:
        """Whether these parameters replace a piece of a checkpoint without them, which then is not read."""
        return False

    def compared(self, stored: Mapping[str, Any], *, only_weights: bool) -> Mapping[str, Any]:
        """Return the settings of a checkpoint without them that the settings of this run must equal.

        ``only_weights``: the run starts with the stored weights, and does not resume the training. Errors:
        ``CheckpointError`` if the run cannot add the parameters.
        """
        return stored

    def set_initial(self, data: DataParallel, stages: Sequence[GPTModel]) -> None:
        """Set initial values that depend on other weights or on files, when these are loaded; not in a resumed run."""


def added_weights(config: RunConfig) -> list[AddedWeights]:
    """Construct the added weights of the features that a run uses."""
    hooks = [feature.added_weights for feature in used_features(config) if feature.added_weights is not None]
    return [load_hook(hook)(config) for hook in hooks]


def weights_saved_alone(config: RunConfig) -> AddedWeights | None:
    """The only weights in the checkpoints of a run; None if its checkpoints contain the whole model."""
    return next((added for added in added_weights(config) if added.saved_alone), None)


def missing_in(stored: Mapping[str, Any], config: RunConfig) -> list[AddedWeights]:
    """The weights of this run that a checkpoint with the settings ``stored`` lacks."""
    return [added for added in added_weights(config) if added.are_missing(stored)]


def outside_of(missing: Sequence[AddedWeights], pieces: Iterable[TensorBox]) -> Iterator[TensorBox]:
    """The pieces of a checkpoint that lacks ``missing``, among the pieces of this run."""
    return (piece for piece in pieces if not any(added.contain(piece.name) for added in missing))


def build_evaluations(config: RunConfig, tokenizer: Tokenizer | None) -> tuple[Evaluation, ...]:
    """Construct the evaluations of the features that a run uses."""
    hooks = [feature.evaluation for feature in used_features(config) if feature.evaluation is not None]
    return tuple(load_hook(hook)(config, tokenizer) for hook in hooks)


def build_parts(config: RunConfig, run: Any) -> tuple[RunPart, ...]:
    """Construct the parts of the features that ``run``, a ``Run``, uses."""
    hooks = [feature.run_part for feature in used_features(config) if feature.run_part is not None]
    return tuple(load_hook(hook)(run) for hook in hooks)


@dataclass(frozen=True)
class Attempt:
    """A computation of a step; equal on all ranks."""

    outcome: StepOutcome
    losses: tuple[float, ...]
    """Sum of the losses of each copy's samples; empty unless ``Attempts.by_copy``."""
    statistics: Callable[[], dict[str, float]]
    """Returns further metrics of the step."""


class Compute(Protocol):
    """Computes the current step."""

    def __call__(self, number: int = 0, *, shift: int = 0, discard: bool = False) -> Attempt:
        """``number``: of the attempt; ``shift``: each copy computes the samples of the copy ``shift`` places after it;
        ``discard``: do not update the weights."""


class Attempts:
    """A run's way of taking steps: each is computed once. A callback that repeats steps derives from it."""

    by_copy = False
    """Whether ``Attempt.losses`` is computed."""

    def take(self, compute: Compute) -> Attempt:
        """Compute the current step; the last attempt is the result of the step."""
        return compute()

    def is_spoiled(self, number: int, shift: int) -> bool:
        """Whether this rank's loss is NaN in an attempt, as a test of repetitions; see ``Compute``."""
        return False
