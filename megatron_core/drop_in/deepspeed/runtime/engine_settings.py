"""Methods of ``DeepSpeedEngine`` that return settings."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler


class EngineSettings:
    """Settings of the JSON configuration, as methods."""

    _config: DeepSpeedConfig

    def train_batch_size(self) -> int:
        """Samples of a step on all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch of one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a rank in a step."""
        return self._config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples of a step, of a micro-batch, micro-batches of a rank in a step)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; if not, each ``step()`` is a boundary."""
        return bool(self._config.managed_gradient_accumulation)

    def gradient_clipping(self) -> float:
        """Largest norm of the gradient; 0: no clipping."""
        return float(self._config.gradient_clipping)

    def steps_per_print(self) -> int | None:
        """Steps between two lines of the log."""
        return self._config.steps_per_print

    def dataloader_drop_last(self) -> bool:
        """Whether loaders leave out the last incomplete micro-batch."""
        return bool(self._config.dataloader_drop_last)

    # Optimizer and scheduler of the JSON.

    def optimizer_name(self) -> str | None:
        """Type of the optimizer in the JSON."""
        return self._config.optimizer_name

    def optimizer_params(self) -> dict[str, Any] | None:
        """Its parameters."""
        return self._config.optimizer_params

    def scheduler_name(self) -> str | None:
        """Type of the scheduler in the JSON."""
        return self._config.scheduler_name

    def scheduler_params(self) -> dict[str, Any] | None:
        """Its parameters."""
        return self._config.scheduler_params

    # Precision.

    def fp16_enabled(self) -> bool:
        """Whether weights are float16."""
        return bool(self._config.float16_config.enabled)

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bfloat16."""
        return bool(self._config.bfloat16_config.enabled)

    def fp16_auto_cast(self) -> bool:
        """Whether floating-point inputs are cast to float16."""
        return self._config.fp16_auto_cast

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of weights and of accumulated gradients."""
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        return dtype, torch.float32

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return self.loss_scale() == 0

    def loss_scale(self) -> float:
        """The constant loss scale of the JSON; 0: it changes. ``optimizer.cur_scale`` is the current one."""
        return float(self._config.translation.settings.get("loss_scale", 0))

    def initial_dynamic_scale(self) -> float:
        """The first loss scale."""
        return float(self._config.translation.settings.get("initial_loss_scale", 2.0**16))

    def torch_autocast_enabled(self) -> bool:
        """Whether forwards run in ``torch.autocast`` with bfloat16."""
        return bool(self._config.torch_autocast_enabled)

    def torch_autocast_dtype(self) -> torch.dtype:
        """The dtype of autocast."""
        return torch.bfloat16

    # ZeRO.

    def zero_optimization(self) -> bool:
        """Whether the stage is at least 1."""
        return self._config.zero_enabled

    def zero_optimization_stage(self) -> int:
        """The stage of ZeRO."""
        return int(self._config.zero_optimization_stage)

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are in shards (stage 2 and 3)."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are in shards (stage 3)."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> Any:
        """The section ``offload_optimizer``; None without offload."""
        return self._config.zero_config.offload_optimizer

    def zero_offload_param(self) -> Any:
        """The section ``offload_param``; None without offload."""
        return self._config.zero_config.offload_param

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether optimizer state is in host memory or on disk."""
        return self.zero_offload_optimizer() is not None

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state is in host memory."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer state is on disk."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device == "nvme"

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether ``save_16bit_model`` writes a model at stage 3."""
        return bool(self._config.zero_config.gather_16bit_weights_on_model_save)

    # Curriculum.

    def curriculum_enabled_legacy(self) -> bool:
        """Whether the section ``curriculum_learning`` is enabled."""
        return bool(self._config.curriculum_enabled_legacy)

    def curriculum_params_legacy(self) -> Mapping[str, Any]:
        """The section ``curriculum_learning``."""
        return self._config.curriculum_params_legacy

    @cached_property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler:
        """The difficulty of each step."""
        return CurriculumScheduler(self._config.curriculum_params_legacy)

    def _with_curriculum(self, kwargs: dict[str, Any], step: int) -> dict[str, Any]:
        """Add the length of sequences to the arguments of the model."""
        if not self.curriculum_enabled_legacy():
            return kwargs
        return {**kwargs, "curriculum_seqlen": self.curriculum_scheduler_legacy.update_difficulty(step)}

    # Features that have other names here.

    def autotp_size(self) -> int:
        """Number of ranks that split each layer; 0 without tensor parallelism."""
        return self._config.autotp_size if self._config.autotp_size > 1 else 0

    def load_universal_checkpoint(self) -> bool:
        """Return False: every checkpoint of this format loads with any number of ranks."""
        return False

    def use_node_local_storage(self) -> bool:
        """Return False: all ranks write into one folder."""
        return False
