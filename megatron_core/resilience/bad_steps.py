"""Handling of bad steps: steps with a non-finite loss or gradient norm, and spikes of the gradient norm.

A bad step is skipped and saved for a replay; after a rollback to the last checkpoint its batch is left out. All
decisions depend only on the step's loss and norm, which are equal on all ranks, so all ranks make the same decision.
Without ``max_bad_steps`` outer groups take steps of their own, and the first bad step of any of them ends the job.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from megatron_core.checkpoint import find_checkpoint
from megatron_core.checkpoint.folder import iteration_folder
from megatron_core.config import CheckpointConfig
from megatron_core.errors import MegatronError
from megatron_core.locations import location
from megatron_core.training.callbacks import Callback
from megatron_core.training.saving import CheckpointSaver
from megatron_core.training.setup import Run
from megatron_core.training.state import open_checkpoint
from megatron_core.training.step import StepResult

WINDOW, FEWEST = 64, 8
"""Number of recent good steps in the reference median of the norm, and the minimum number to detect a spike."""
FOLDER = "bad_steps"


class BadSteps(Callback):
    """Detects bad steps and skips them, saves them, rolls the run back or ends it."""

    priority = 400

    def __init__(self, run: Run) -> None:
        self.run, self._settings = run, run.config.resilience
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._kept = 0

    def stored_values(self) -> dict[str, list[float]]:
        """The recent norms, so that a resumed run finds the same spikes."""
        return {} if self._settings.spike_factor is None else {"norms": list(self._norms)}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Continue with the norms of the checkpoint."""
        self._norms.extend(values["norms"])

    def is_bad(self, loss: float, grad_norm: float) -> bool:
        """Whether a step with finite gradients must be skipped: its loss is not finite or its norm is a spike."""
        return not math.isfinite(loss) or self._is_spike(grad_norm)

    def _is_spike(self, norm: float) -> bool:
        factor = self._settings.spike_factor
        return factor is not None and len(self._norms) >= FEWEST and norm > factor * median(self._norms)

    def after_step(self, result: StepResult) -> None:
        """Count a step, and roll back to the last checkpoint after more than ``max_bad_steps`` consecutive bad steps.

        Errors: ``MegatronError`` with ``max_bad_steps=0``, without a checkpoint, or after ``max_rollbacks`` rollbacks.
        """
        run = self.run
        if not self._counts(result):
            if not result.skipped:
                self._norms.append(result.grad_norm)
                run.bad_steps = []
            return
        run.bad_steps.append(run.state.iteration)
        bundle = self._keep(result)
        if len(run.bad_steps) <= self._settings.max_bad_steps:
            self._say(f"{self._description(result)}; the step was skipped{bundle}")
            return
        if self._settings.max_bad_steps == 0:
            raise MegatronError(f"{self._description(result)}; the step was skipped{bundle}. {_WAYS_OUT}")
        self._roll_back(result)

    def _counts(self, result: StepResult) -> bool:
        """Whether a step is bad; with fp16, overflow of gradients is not, while the loss scale can still decrease."""
        if not self.run.config.training.check_for_nan_in_loss_and_grad:
            return False
        if not math.isfinite(result.loss):
            return True
        overflow = result.loss_scale > self.run.optimizer.loss_scale.minimum and not math.isfinite(result.grad_norm)
        return result.skipped and not overflow

    def _description(self, result: StepResult) -> str:
        size, iteration = result.size, self.run.state.iteration
        name, value = ("loss", result.loss) if not math.isfinite(result.loss) else ("gradient norm", result.grad_norm)
        reason = ""
        if math.isfinite(value):
            is_spike = self._is_spike(value)
            reason = f"a spike over the median of {median(self._norms):.4g}" if is_spike else "rejected by a callback"
            reason = f", {reason},"
        scale = f" with the loss scale {result.loss_scale:g}" if self.run.config.training.fp16 else ""
        return (
            f"the {name} is {value}{reason}{scale} at iteration {iteration} (samples {size.consumed_samples} to "
            f"{size.end - 1})"
        )

    def _say(self, text: str) -> None:
        if self.run.world.rank == 0:
            print(f"note: {text}", flush=True)

    def _keep(self, result: StepResult) -> str:
        """Save the weights of this step for ``megatron-replay-step``; return a clause for the message, or "".

        A skipped step does not change the weights, so the current weights are those of its forward pass.
        """
        run, settings = self.run, self.run.config.checkpoint
        has_groups = run.groups.outer.size() > 1  # each has weights of its own
        if settings.save is None or self._kept >= self._settings.save_bad_steps or has_groups:
            return ""
        self._kept += 1
        size, state = result.size, run.state
        before = replace(
            state,
            iteration=state.iteration - 1,
            consumed_samples=size.consumed_samples,
            consumed_tokens=state.consumed_tokens - size.tokens,
            skipped_iterations=state.skipped_iterations - 1,
            skipped_samples=state.skipped_samples - size.batch_size,
        )
        into = CheckpointConfig(save=str(location(settings.save) / FOLDER), no_save_optim=True)
        saver = CheckpointSaver(
            replace(run.config, checkpoint=into),
            run.data_parallel,
            run.optimizer,
            vocab_size=run.vocab_size,
            tokenizer=run.tokenizer,
        )
        if not saver.try_to_save(before):
            return ""
        folder = iteration_folder(saver.folder, before.iteration)
        return f" (megatron-replay-step {folder} runs it in one process)"

    def _roll_back(self, result: StepResult) -> None:
        """Load the last checkpoint into this run, and leave out the batches of the bad steps after that."""
        run, bad = self.run, tuple(self.run.bad_steps)
        state, save = run.state, run.config.checkpoint.save
        run.saver.finish()
        folder = find_checkpoint(save) if save is not None else None
        problem = f"{self._description(result)}; bad steps in a row: {len(bad)}"
        if folder is None:
            raise MegatronError(f"{problem}, and there is no checkpoint to return to. {_WAYS_OUT}")
        if state.rollbacks >= self._settings.max_rollbacks:
            raise MegatronError(f"{problem}, after {state.rollbacks} rollbacks to a checkpoint. {_WAYS_OUT}")
        config = replace(run.config, checkpoint=run.config.checkpoint.for_resume())
        reader, _ = open_checkpoint(config, run.world.device)
        assert reader is not None, "it was found above"
        self._clear()
        run.state = run.load(config, reader)
        run.state.left_out = sorted({*run.state.left_out, *state.left_out, *bad})
        run.state.rollbacks, run.state.data = state.rollbacks + 1, state.data
        run.bad_steps = []
        self._say(f"{problem}: back to iteration {run.state.iteration}; the batches of {list(bad)} are left out")

    def _clear(self) -> None:
        """Set weights and optimizer state to zero: a checkpoint does not store the padding rows of the vocabulary, and
        NaN left in these rows would reach the gradients."""
        self.run.data_parallel.finish_param_sync()
        for bucket in self.run.data_parallel.buckets:
            bucket.release_weights()  # ZeRO-3 gathers them again
            if bucket.is_whole:
                bucket.weights.zero_()
            bucket.weight_shard.zero_()
        for _, tensors in self.run.optimizer.tensors():
            for flat in tensors.values():
                flat.zero_()


_WAYS_OUT = (
    "Lower --lr, lengthen --lr-warmup-iters, look at the data of these samples, skip such steps with --max-bad-steps, "
    "or let the run continue past all of them with --no-check-for-nan-in-loss-and-grad"
)
