"""Methods of ``DeepSpeedEngine`` that return settings."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import reader
from deepspeed.runtime.data_pipeline.curriculum_sampler import CurriculumSampler
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop
from deepspeed.utils.logging import warning_once
from megatron_core.errors import ConfigError


def _setting(path: str, text: str) -> Callable[[Any], Any]:
    return reader(f"_config.{path}", text)


class EngineSettings:
    """Settings of the JSON configuration, as methods."""

    _config: DeepSpeedConfig
    device: torch.device
    training_dataloader: DeepSpeedDataLoader | None

    train_batch_size = _setting("train_batch_size", "Samples of a step on all ranks.")
    train_micro_batch_size_per_gpu = _setting("train_micro_batch_size_per_gpu", "Samples of a micro-batch of one rank.")
    gradient_accumulation_steps = _setting("gradient_accumulation_steps", "Micro-batches of a rank in a step.")
    managed_gradient_accumulation = _setting(
        "managed_gradient_accumulation", "Whether the engine counts micro-batches; else each ``step()`` is a boundary."
    )
    gradient_clipping = _setting("gradient_clipping", "Largest norm of the gradient; 0: no clipping.")
    steps_per_print = _setting("steps_per_print", "Steps between two lines of the log; None: no lines.")
    dataloader_drop_last = _setting("dataloader_drop_last", "Whether loaders leave out an incomplete micro-batch.")
    optimizer_name = _setting("optimizer_name", "Type of the optimizer in the JSON; None without one.")
    optimizer_params = _setting("optimizer_params", "Parameters of the optimizer in the JSON; None without one.")
    scheduler_name = _setting("scheduler_name", "Type of the scheduler in the JSON; None without one.")
    scheduler_params = _setting("scheduler_params", "Parameters of the scheduler in the JSON; None without one.")
    fp16_auto_cast = _setting("fp16_auto_cast", "Whether floating-point inputs are cast to float16.")
    torch_autocast_enabled = _setting(
        "torch_autocast_enabled", "Whether forwards run in ``torch.autocast`` with bfloat16."
    )
    zero_optimization = _setting("zero_enabled", "Whether the stage is at least 1.")
    zero_optimization_stage = _setting("zero_optimization_stage", "The stage of ZeRO.")
    curriculum_enabled_legacy = _setting(
        "curriculum_enabled_legacy", "Whether the section ``curriculum_learning`` is enabled."
    )
    curriculum_learning_enabled = _setting(
        "curriculum_learning_enabled", "Whether ``data_efficiency.data_sampling.curriculum_learning`` is enabled."
    )
    data_efficiency_config = _setting("data_efficiency_config", "The section ``data_efficiency``.")
    curriculum_params_legacy = _setting("curriculum_params_legacy", "The section ``curriculum_learning``.")
    pld_enabled = _setting("pld_params.enabled", "Whether the section ``progressive_layer_drop`` is enabled.")
    pld_theta = _setting("pld_params.theta", "Smallest share of layers to keep.")
    pld_gamma = _setting("pld_params.gamma", "Rate at which the share of layers falls.")
    fp16_enabled = _setting("float16_config.enabled", "Whether weights are float16.")
    bfloat16_enabled = _setting("bfloat16_config.enabled", "Whether weights are bfloat16.")
    zero_offload_optimizer = _setting("zero_config.offload_optimizer", "The section; None without it.")
    zero_offload_param = _setting("zero_config.offload_param", "The section; None without it.")
    zero_gather_16bit_weights_on_model_save = _setting(
        "zero_config.gather_16bit_weights_on_model_save", "Whether ``save_16bit_model`` writes a model at stage 3."
    )

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples of a step, of a micro-batch, micro-batches of a rank in a step)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

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

    def torch_autocast_dtype(self) -> torch.dtype:
        """The dtype of autocast."""
        return torch.bfloat16

    def _autocast(self) -> torch.autocast:
        """Return the context of a forward: that of ``torch_autocast``, whatever context the program has around it."""
        if torch.is_autocast_enabled(self.device.type) and not self.torch_autocast_enabled():
            warning_once("torch.autocast around the engine's forward has no effect: set torch_autocast in the JSON")
        return torch.autocast(self.device.type, self.torch_autocast_dtype(), enabled=self.torch_autocast_enabled())

    # ZeRO.

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are in shards (stage 2 and 3)."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are in shards (stage 3)."""
        return self.zero_optimization_stage() >= 3

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether optimizer state is in host memory or on disk."""
        return self.zero_cpu_offload() or self.zero_nvme_offload_optimizer()

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state is in host memory."""
        return getattr(self.zero_offload_optimizer(), "device", "none") == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer state is on disk."""
        return getattr(self.zero_offload_optimizer(), "device", "none") == "nvme"

    # Curriculum.

    @cached_property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler:
        """The difficulty of each step."""
        return CurriculumScheduler(self._config.curriculum_params_legacy)

    def _curriculum(self, samples: int, rank: int, ranks: int) -> CurriculumSampler:
        """Return the sampler of the section ``data_efficiency``."""
        sizes = self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()
        section = self.data_efficiency_config()
        return CurriculumSampler(section, samples, sizes, (rank, ranks), self.dataloader_drop_last())

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Change each batch of a curriculum by ``post_process_func(batch, state)``, as to its length of sequences."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Set the functions of metrics with ``schedule_type`` custom."""
        for name, metric in getattr(getattr(self.training_dataloader, "data_sampler", None), "metrics", {}).items():
            if name in schedule_func_dict:
                metric.schedule.set_custom_get_difficulty(schedule_func_dict[name])

    @cached_property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The share of layers to keep; None without the section."""
        return ProgressiveLayerDrop(self.pld_theta(), self.pld_gamma()) if self.pld_enabled() else None

    def _check_curriculum(self, stages: int) -> None:
        """Construct the schedule of difficulties, if any, so that a wrong section fails before training."""
        if self.curriculum_learning_enabled() and self.training_dataloader is None:
            warning_once(
                "data_efficiency.data_sampling.curriculum_learning has no effect on loaders of the program, also of "
                "transformers.Trainer; give training_data to deepspeed.initialize, or call engine.deepspeed_io(dataset)"
            )
        if self.curriculum_enabled_legacy():
            kind = self.curriculum_scheduler_legacy.config.get("curriculum_type", "seqlen")
            if kind != "seqlen" or stages > 1:
                raise ConfigError(
                    f"curriculum_learning.curriculum_type={kind!r} must be 'seqlen', and the model no PipelineModule"
                )

    def get_pld_theta(self) -> float | None:
        """Return the share of layers to keep; None without the section."""
        return None if self.progressive_layer_drop is None else self.progressive_layer_drop.get_theta()

    def _with_schedules(self, kwargs: dict[str, Any], step: int) -> dict[str, Any]:
        """Add the length of sequences and the share of layers to keep to the arguments of the model."""
        if self.curriculum_enabled_legacy():
            kwargs = {**kwargs, "curriculum_seqlen": self.curriculum_scheduler_legacy.update_difficulty(step)}
        dropped = self.progressive_layer_drop
        return kwargs if dropped is None else {**kwargs, **dropped.get_state()}

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
