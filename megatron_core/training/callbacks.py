"""Callbacks: code that runs at fixed points of a training run, in the order of priorities."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from megatron_core.errors import MegatronError
from megatron_core.feature import load_hook, used_features
from megatron_core.monitor.events import ValidationEvent
from megatron_core.parallel.exit_status import RESTART, exit_explanation
from megatron_core.pipeline_parallel.executor import Listener
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class Callback:
    """Base class of callbacks; override the methods you need.

    ``train`` calls the methods of all callbacks on every rank, by descending ``priority`` and for equal priorities in
    the order of adding::

        load_values if the run resumes, before_run
        for each step: before_step, around_plan, before_update, is_bad, after_step
            after an evaluation: after_evaluation
            stored_values
            around a checkpoint: before_save, after_save
        after_run, or on_failure after an exception
        close

    ``on_failure``, ``after_run`` and ``close`` are called only if ``before_run`` of the same callback succeeded. All
    methods except ``on_failure`` and ``close`` may call collectives. With ``skip_train`` there are no steps and saves.
    """

    priority: int = 0
    """Callbacks of higher priority are called first; ``docs/extend.md`` lists those of the library."""
    run: Run
    """The run: its configuration, model, optimizer, data and counters; set before ``before_run``."""

    def __init__(self, run: Run | None = None) -> None:
        """``run``: of a callback that is constructed with it."""
        if run is not None:
            self.run = run

    def before_run(self) -> None:
        """Called once, after the checkpoint is loaded and before the first step."""

    def before_step(self) -> None:
        """Called before each step; ``run.state.iteration`` is the number of steps taken so far."""

    def before_update(self) -> None:
        """Called when the gradients of a step are summed over all ranks, before they are clipped."""

    def around_plan(self, listener: Listener) -> AbstractContextManager[Listener]:
        """Return a context of the forward and backward of a step, with the executor's listener to use in it."""
        return nullcontext(listener)

    def is_bad(self, loss: float, grad_norm: float) -> bool:
        """Return whether to skip the update of this step; the result must be equal on all ranks."""
        return False

    def after_step(self, result: StepResult) -> None:
        """Called after each step; after a rollback ``run.state.iteration`` is that of the loaded checkpoint."""

    def after_evaluation(self, event: ValidationEvent) -> None:
        """Called after each evaluation."""

    def before_save(self, temporary: bool) -> None:
        """Called before each checkpoint; ``temporary``: it is only for a fast restart."""

    def after_save(self, temporary: bool, saved: bool) -> None:
        """Called after each checkpoint; ``saved``: it is written, or with ``async_save`` being written."""

    def after_run(self) -> None:
        """Called once, after the last step, evaluation and checkpoint of a run without errors."""

    def on_failure(self, error: Exception) -> None:
        """Called when a rank fails, only on this rank.

        A ``MegatronError`` raised here replaces ``error``; other exceptions are only printed.
        """

    def close(self) -> None:
        """Called last, also after a failure or an interrupt, in reverse order: restore what ``before_run`` changed."""

    def stored_values(self) -> Mapping[str, Any]:
        """Return values to store in checkpoints: JSON types, equal on all ranks; called after each step."""
        return {}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Called before ``before_run`` if the run resumes from a checkpoint: ``stored_values`` when it was written."""


class Callbacks:
    """Calls the callbacks of a run in the order of their priorities.

    A message on standard error names the callback and the method in which an exception was raised.
    """

    def __init__(self, run: Run, callbacks: Iterable[Callback]) -> None:
        self._run = run
        # The sort is stable: callbacks of equal priority keep the order in which they were added.
        self._callbacks = sorted(callbacks, key=lambda callback: -_checked(callback).priority)
        self._begun: list[Callback] = []
        """Callbacks whose ``before_run`` succeeded."""
        self._names = _names(self._callbacks)
        for callback in self._callbacks:
            callback.run = run

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call ``before_run``; after the context ``after_run`` or, if it raised, ``on_failure``; finally ``close``."""
        with ExitStack() as stack:
            try:
                self._load_values()
                for callback in self._callbacks:
                    self._call(callback, "before_run")
                    self._begun.append(callback)
                    # Only now: a callback whose before_run failed has nothing to restore.
                    stack.callback(self._call, callback, "close")
                yield
            except Exception as error:
                self._on_failure(error)
                raise
            self.call("after_run")

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call ``method`` of all callbacks; return the results."""
        return [self._call(callback, method, *arguments) for callback in self._begun]

    @property
    def step_hooks(self) -> StepHooks:
        """The methods that the driver calls within a step."""
        return StepHooks(
            around_plan=self._around_plan,
            before_update=partial(self.call, "before_update"),
            is_bad=lambda loss, grad_norm: any(self.call("is_bad", loss, grad_norm)),
        )

    @contextmanager
    def _around_plan(self, listener: Listener) -> Iterator[Listener]:
        with ExitStack() as stack:
            for callback in self._begun:
                listener = stack.enter_context(self._call(callback, "around_plan", listener))
            yield listener

    def store_values(self) -> None:
        """Put the values that callbacks store into the state of the run, for checkpoints and copies of it."""
        values = {name: dict(self._call(callback, "stored_values")) for name, callback in self._names.items()}
        self._run.state.callbacks = {name: stored for name, stored in values.items() if stored}

    def _load_values(self) -> None:
        state = self._run.state
        stored = state.callbacks
        for name, callback in self._names.items():
            if name in stored:
                self._call(callback, "load_values", stored[name])
            elif state.iteration and self._call(callback, "stored_values"):
                self._say(f"callback {name} has no values in the checkpoint and starts without")
        # A run that only evaluates has fewer callbacks and saves nothing.
        unused = [] if self._run.config.training.skip_train else sorted(stored.keys() - self._names.keys())
        for name in unused:
            self._say(f"the checkpoint has values of callback {name}, which this run does not have; they are dropped")

    def _say(self, text: str) -> None:
        if self._run.world.rank == 0:
            print(f"note: {text}", flush=True)

    def _on_failure(self, error: Exception) -> None:
        raised = error
        for callback in self._begun:
            try:
                self._call(callback, "on_failure", raised)
            except MegatronError as other:
                raised = other
            except Exception:
                continue  # its message is printed; it must not hide the first error
        if raised is not error:
            raise raised

    def _call(self, callback: Callback, method: str, *arguments: object) -> Any:
        try:
            return getattr(callback, method)(*arguments)
        except Exception as error:
            known = exit_explanation(error)
            if isinstance(error, MegatronError) or (known is not None and known[0] == RESTART):
                raise  # the message is complete, or another rank has failed
            where = f"{type(callback).__name__}.{method} (priority {callback.priority})"
            what = f"failed after iteration {self._run.state.iteration}: {type(error).__name__}: {error}"
            print(f"{self._run.world.prefix} callback {where} {what}".lstrip(), file=sys.stderr, flush=True)
            raise


def _names(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    # Not by position: other settings add and remove callbacks, and values must return to the class that stored them.
    """Callbacks by the name of their class, as in checkpoints; a second one of a class is ``CLASS 2``."""
    seen: Counter[str] = Counter()
    names = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        seen[name] += 1
        names[name if seen[name] == 1 else f"{name} {seen[name]}"] = callback
    return names


def feature_callbacks(run: Run) -> list[Callback]:
    """Construct the callbacks of the features that ``run`` uses."""
    return [load_hook(hook)(run) for feature in used_features(run.config) for hook in feature.callbacks]


def _checked(callback: object) -> Callback:
    if not isinstance(callback, Callback):
        raise TypeError(
            f"callbacks={callback!r} must be objects of classes derived from megatron_core.training.Callback"
        )
    return callback


def is_due(iteration: int, interval: int | None) -> bool:
    """Whether an action with period ``interval`` is due at ``iteration``; never with None."""
    return interval is not None and iteration % interval == 0
