"""``DeepSpeedConfig``: the JSON configuration after translation, under DeepSpeed's attribute names."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from deepspeed.monitor.monitor import get_monitor_config
from deepspeed.optimizers import OWN_OPTIMIZERS
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, section_as
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config
from deepspeed.translation import CLIPPING, read_json, translate
from megatron_core.errors import ConfigError as DeepSpeedConfigError
from megatron_core.launcher import read_integer

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "add_config_arguments", "get_gradient_clipping"]


def _own_case(name: str) -> str:
    """Return DeepSpeed's own optimizers in lower case, classes of torch.optim as they are."""
    return name.lower() if name.lower() in OWN_OPTIMIZERS else name


class DeepSpeedConfig:
    """Reads a JSON configuration, a dict or a file, and translates it for the ranks of the job.

    ``mpu``: an object with ``get_data_parallel_world_size()``, if the job has model parallelism. ``has_mpu``: the job
    has one, whose groups the engine makes itself. ``translation``: the result in settings of this project.

    Errors: ``DeepSpeedConfigError`` with all problems.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str],
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        has_mpu: bool = False,
    ) -> None:
        ranks = _ranks_of_a_stage(mpu)
        self._param_dict = read_json(config)
        self.translation = found = translate(self._param_dict, ranks, has_mpu=has_mpu or mpu is not None)
        sizes = [found.settings.get(f"{axis}_parallel_size", 1) for axis in ("tensor_model", "context")]
        self.autotp_size, self.sequence_parallel_size = sizes
        self.world_size = ranks // (self.autotp_size * self.sequence_parallel_size)
        self.train_batch_size = found.train_batch_size
        self.train_micro_batch_size_per_gpu = found.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps = found.gradient_accumulation_steps
        self.gradient_allreduce_op = "sum" if found.sums_gradients else "mean"
        self.gradient_clipping = found.settings["clip_grad"]
        self.zero_optimization_stage = found.settings["zero_stage"]
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = get_float16_config(self._param_dict)
        self.bfloat16_config = get_bfloat16_config(self._param_dict)
        self.optimizer_name = _own_case(found.optimizer.name) if found.optimizer else None
        self.optimizer_params = found.optimizer.params if found.optimizer else None
        self.scheduler_name = found.scheduler.name if found.scheduler else None
        self.scheduler_params = found.scheduler.params if found.scheduler else None
        self.steps_per_print = self._param_dict.get("steps_per_print")
        self.dataloader_drop_last = self._param_dict.get("dataloader_drop_last", False)
        self.managed_gradient_accumulation = self._param_dict.get("managed_gradient_accumulation", True)
        self.tag_validation = found.tag_validation
        self.monitor_config = get_monitor_config(self._param_dict)
        self.wall_clock_breakdown = self._param_dict.get("wall_clock_breakdown", False)
        profiler = self._param_dict.get("flops_profiler") or {}
        self.flops_profiler_config = section_as(DeepSpeedFlopsProfilerConfig, "flops_profiler", profiler)
        self.data_efficiency_config = self._param_dict.get("data_efficiency") or {}
        sampling = self.data_efficiency_config.get("data_sampling") or {}
        # As in DeepSpeed, the other flags of the section are not read.
        self.curriculum_learning_enabled = bool((sampling.get("curriculum_learning") or {}).get("enabled"))
        self.curriculum_params_legacy = self._param_dict.get("curriculum_learning") or {}
        self.curriculum_enabled_legacy = bool(self.curriculum_params_legacy.get("enabled"))
        dropped = self._param_dict.get("progressive_layer_drop") or {}
        self.pld_params = section_as(ProgressiveLayerDropConfig, "progressive_layer_drop", dropped)
        autocast = self._param_dict.get("torch_autocast") or {}
        self.torch_autocast_enabled = autocast.get("enabled", False)
        self.zero_config = section_as(DeepSpeedZeroConfig, "zero_optimization", get_zero_config(self._param_dict))
        self.fp16_auto_cast = self.float16_config.enabled and self.float16_config.auto_cast


class ProgressiveLayerDropConfig(DeepSpeedConfigModel):
    """The section ``progressive_layer_drop``."""

    enabled: bool = False
    theta: float = 1.0
    gamma: float = 0.001


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigModel):
    """The section ``flops_profiler``."""

    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None


def _ranks_of_a_stage(mpu: Any) -> int:
    if mpu is not None:
        return int(mpu.get_data_parallel_world_size())
    return dist.get_world_size() if dist.is_initialized() else read_integer("WORLD_SIZE", 1, least=1)


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the value of ``gradient_clipping``, or its default."""
    return float(param_dict.get("gradient_clipping", CLIPPING))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` and their deprecated names to ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name, state in (("deepspeed", ""), ("deepscale", "deprecated: ")):
        group.add_argument(f"--{name}", action="store_true", help=f"{state}use the engine; read by the program")
        group.add_argument(f"--{name}_config", help=f"{state}file with the JSON configuration")
    return parser
