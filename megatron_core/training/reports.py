"""Events of a run's steps and evaluations for the sinks."""

import math
import time
from collections.abc import Sequence

from megatron_core.config.flops import flops_per_token
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class Reports(Callback):
    """Sends an event for each step and each evaluation to the sinks."""

    priority = 600

    def __init__(self, run: Run, sinks: Sequence[Sink]) -> None:
        self.run = run
        self._sinks = sinks
        self._began = 0.0

    def before_step(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def after_step(self, result: StepResult) -> None:
        """Send the event of the step; folders of reports that were deleted are created again before."""
        run, size = self.run, result.size
        run.saver.restore_folders()
        seconds = time.perf_counter() - self._began
        added_fields = [fields(result) for fields in run.event_fields]
        flops = size.tokens * flops_per_token(run.config.model, size.sequence_length, run.vocab_size)
        event = StepEvent(
            iteration=run.state.iteration,
            total_iterations=run.total_iterations,
            consumed_samples=run.state.consumed_samples,
            consumed_tokens=run.state.consumed_tokens,
            loss=result.loss,
            learning_rate=result.learning_rate,
            global_batch_size=size.batch_size,
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            elapsed_ms=1000.0 * seconds,
            tokens_per_second=size.tokens / seconds,
            model_flops_per_second=flops / seconds / run.world.size,
            memory_bytes=peak_memory_bytes(),
            auxiliary_losses=result.auxiliary_losses,
            expert_load=result.expert_load,
            breakdown=result.breakdown,
            skipped=result.skipped,
            params_norm=math.sqrt(result.statistics[0]) if run.config.monitor.log_params_norm else None,
            num_zeros_in_grad=round(result.statistics[1]) if run.config.monitor.log_num_zeros_in_grad else None,
            layout=run.layout,
            **{name: value for fields in added_fields for name, value in fields.items()},
        )
        for sink in self._sinks:
            sink.on_step(event)

    def after_evaluation(self, event: ValidationEvent) -> None:
        """Send the event of an evaluation."""
        for sink in self._sinks:
            sink.on_validation(event)
