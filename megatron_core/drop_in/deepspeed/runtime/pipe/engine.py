"""``PipelineEngine``: DeepSpeed's engine of a ``PipelineModule``, over the pipeline engine of ``megatron_core``."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineError, PipelineModule
from megatron_core.any_model.pipeline import PipelineEngine as NativeEngine
from megatron_core.errors import ConfigError


class PipelineEngine(DeepSpeedEngine):
    """Trains a ``PipelineModule`` by whole batches: ``train_batch`` and ``eval_batch``."""

    core: NativeEngine
    module: PipelineModule

    def __init__(self, model: PipelineModule, **kwargs: Any) -> None:
        self.__dict__["grid"] = self.__dict__["_grid"] = model.mpu()
        super().__init__(model=model, **kwargs)
        section = self._config._param_dict.get("pipeline") or {}
        if interval := section.get("activation_checkpoint_interval"):
            self.module.set_checkpoint_interval(int(interval))
        self.num_stages, self.stage_id = self.grid.pipe_parallel_size, self.grid.stage_id
        self.micro_batches = self.gradient_accumulation_steps()
        self.micro_batch_size = self.train_micro_batch_size_per_gpu()
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss: Tensor | None = None
        """Mean loss of the last ``train_batch``, equal on all ranks."""
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    def set_dataloader(self, loader: Any) -> None:
        """Read micro-batches from ``loader``, again and again, if ``train_batch`` gets no iterator."""
        if self.reads_data():
            self.training_dataloader = loader
            self.data_iterator = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read micro-batches from ``iterator`` if ``train_batch`` gets no iterator."""
        if self.reads_data():
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to each micro-batch; it returns (inputs, labels)."""
        self.batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: messages between stages carry tensors of any dtype, masks too."""

    def reads_data(self) -> bool:
        """Whether this stage reads micro-batches."""
        return self.is_first_stage() or self.is_last_stage()

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return bool(self.grid.is_first_stage)

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return bool(self.grid.is_last_stage)

    def get_pipeline_parallel_rank(self) -> int:
        """Stage of this rank."""
        return self.stage_id

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:  # type: ignore[override]
        """Take one step with the next micro-batches of ``data_iter``; return their mean loss, on all ranks."""
        self._require_optimizer("train_batch")
        if not self.module.training:
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        with self._timed("step"):
            report = self.core.train_batch(self._batches(self.data_iterator))
        self.micro_steps += self.gradient_accumulation_steps()
        self._step_applied = not report.skipped
        self._report_step(report)
        self.agg_train_loss = torch.tensor(report.loss, device=self.device)
        every = self.steps_per_print()
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(f"steps: {self.global_steps} loss: {report.loss:0.4f} lr: {self.get_lr()}", flush=True)
        return self.agg_train_loss

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean loss of the next micro-batches of ``data_iter``, on all ranks; weights do not change."""
        if return_logits or not compute_loss or reduce_output != "avg" or num_micro_batches is not None:
            raise ConfigError(
                f"eval_batch: return_logits={return_logits}, compute_loss={compute_loss}, reduce_output="
                f"{reduce_output!r}, num_micro_batches={num_micro_batches} are not supported; remove them"
            )
        return torch.tensor(self.core.eval_batch(self._batches(data_iter)), device=self.device)

    def _batches(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        if iterator is None or not self.reads_data():
            return None
        return iterator if self.batch_fn is None else map(self.batch_fn, iterator)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step: each ``train_batch`` is a whole step."""
        return True

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise ``PipelineError``."""
        raise PipelineError("Only train_batch() is accessible in pipeline mode.")

    backward = step = forward
