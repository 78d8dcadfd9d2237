"""Metrics for TensorBoard under Megatron-LM's tags."""

from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.monitor.build import SinkContext
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.output_file import make_folder
from megatron_core.reports.settings import TensorBoardConfig


class TensorBoardSink:
    """Writes the scalars of every step; the tensorboard package is imported only when a sink is created."""

    setting = "tensorboard_dir"

    def __init__(self, folder: str | Path, *, start_iteration: int = 0) -> None:
        """Open ``folder``; events of an earlier run after ``start_iteration`` are hidden."""
        self._folder = Path(folder)
        try:
            self._open(start_iteration + 1 if start_iteration else None)
        except OSError as error:
            raise ConfigError(f"tensorboard_dir={str(folder)!r} cannot be written: {error}; give another") from None

    def _open(self, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_folder(self._folder)
        self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=purge_step)

    def on_step(self, event: StepEvent) -> None:
        """Write one step, including NaN, which TensorBoard marks."""
        if not self._folder.is_dir():
            self._open()  # it was deleted
        for tag, value in scalars(event).items():
            if value is not None:
                self._writer.add_scalar(tag, value, event.iteration)
        self._writer.add_scalar("lm loss vs samples", event.loss, event.consumed_samples)

    def on_validation(self, event: ValidationEvent) -> None:
        """Write one evaluation."""
        for tag, value in event.scalars.items():
            self._writer.add_scalar(tag, value, event.iteration)
            self._writer.add_scalar(f"{tag} vs samples", value, event.consumed_samples)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def open_tensorboard(context: SinkContext) -> TensorBoardSink:
    """Create the sink of a run."""
    folder = context.config.section(TensorBoardConfig).tensorboard_dir
    return TensorBoardSink(str(folder), start_iteration=context.start_iteration)


def scalars(event: StepEvent) -> dict[str, float | None]:
    """Scalars of a step by Megatron-LM's tags; None if absent."""
    return {
        "learning-rate": event.learning_rate,
        "batch-size": event.global_batch_size,
        "lm loss": event.loss,
        "loss-scale": event.loss_scale,
        "grad-norm": event.grad_norm,
        "params-norm": event.params_norm,
        "num-zeros": event.num_zeros_in_grad,
        "iteration-time": event.elapsed_ms / 1000.0,
        "throughput": event.model_flops_per_second / 1e12,
        "tokens-per-second": event.tokens_per_second,
        "mem-max-allocated-bytes": event.memory_bytes,
        "utilisation": event.utilisation,
        "goodput": event.goodput,
        **{f"time/{name}": seconds for name, seconds in event.phases.items()},
        **{f"memory/{category}": size for category, size in event.memory.items()},
        **event.auxiliary_losses,
        **event.breakdown,
    }
