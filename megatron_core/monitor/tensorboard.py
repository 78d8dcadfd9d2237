"""Metrics for TensorBoard under Megatron-LM's tags."""

from pathlib import Path

from megatron_core.monitor.events import StepEvent, ValidationEvent


class TensorBoardSink:
    """Writes every step's scalars; the package is imported only when there is one of these."""

    setting = "tensorboard_dir"

    def __init__(self, folder: str | Path, *, start_iteration: int = 0) -> None:
        """Open ``folder``; what an earlier run wrote after ``start_iteration`` is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        purge = start_iteration + 1 if start_iteration else None
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge)

    def on_step(self, event: StepEvent) -> None:
        """Write one step; NaN is written too, and TensorBoard marks it."""
        for tag, value in scalars(event).items():
            if value is not None:
                self._writer.add_scalar(tag, value, event.iteration)
        self._writer.add_scalar("lm loss vs samples", event.loss, event.consumed_samples)

    def on_validation(self, event: ValidationEvent) -> None:
        """Write one evaluation."""
        for tag, value in (("", event.loss), (" ppl", event.perplexity)):
            self._writer.add_scalar(f"lm loss {event.split}{tag}", value, event.iteration)
            self._writer.add_scalar(f"lm loss {event.split}{tag} vs samples", value, event.consumed_samples)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def scalars(event: StepEvent) -> dict[str, float | None]:
    """The numbers of a step by Megatron-LM's tags."""
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
        **{f"memory/{kind}": size for kind, size in event.memory.items()},
        **event.auxiliary_losses,
        **event.breakdown,
    }
