"""``DeepSpeedConfig``: the JSON configuration after translation, under DeepSpeed's attribute names."""

import argparse
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from deepspeed.monitor.monitor import get_monitor_config
from deepspeed.optimizers import OWN_OPTIMIZERS
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.translation import CLIPPING, read_json, translate, with_new_names
from megatron_core.errors import ConfigError as DeepSpeedConfigError
from megatron_core.launcher import read_integer

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "add_config_arguments", "get_gradient_clipping"]

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"

GATHER = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
GATHER_FP16 = "stage3_gather_fp16_weights_on_model_save"


def _own_case(name: str) -> str:
    """Return DeepSpeed's own optimizers in lower case, classes of torch.optim as they are."""
    return name.lower() if name.lower() in OWN_OPTIMIZERS else name


class DeepSpeedConfig:
    """Reads a JSON configuration, a dict or a file, and translates it for the ranks of the job.

    ``mpu``: an object with ``get_data_parallel_world_size()``, if the job has model parallelism. ``translation``: the
    result in settings of this project. Errors: ``DeepSpeedConfigError`` with all problems.
    """

    def __init__(
        self, config: Mapping[str, Any] | str | os.PathLike[str], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        ranks = _ranks_of_a_stage(mpu)
        self._param_dict = read_json(config)
        self.translation = found = translate(self._param_dict, ranks)
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
        self.float16_config = SimpleNamespace(enabled=found.settings["fp16"])
        self.bfloat16_config = SimpleNamespace(enabled=found.settings["bf16"])
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
        self.flops_profiler_config = DeepSpeedFlopsProfilerConfig(**(self._param_dict.get("flops_profiler") or {}))
        self.curriculum_params_legacy = self._param_dict.get("curriculum_learning") or {}
        self.curriculum_enabled_legacy = bool(self.curriculum_params_legacy.get("enabled"))
        autocast = self._param_dict.get("torch_autocast") or {}
        self.torch_autocast_enabled = autocast.get("enabled", False)
        zero = with_new_names(self._param_dict).get("zero_optimization")
        zero = zero if isinstance(zero, Mapping) else {}
        offload = {name: zero[name] for name in ("offload_optimizer", "offload_param") if zero.get(name)}
        self.zero_config = SimpleNamespace(
            stage=self.zero_optimization_stage,
            offload_optimizer=_section(offload.get("offload_optimizer")),
            offload_param=_section(offload.get("offload_param")),
            gather_16bit_weights_on_model_save=any(bool(zero.get(name)) for name in (*GATHER, GATHER_FP16)),
        )
        fp16 = self._param_dict.get("fp16")
        self.fp16_auto_cast = self.float16_config.enabled and bool((fp16 or {}).get("auto_cast"))


class DeepSpeedFlopsProfilerConfig(DeepSpeedConfigModel):
    """The section ``flops_profiler``."""

    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None


def _section(values: Any) -> SimpleNamespace | None:
    if not isinstance(values, Mapping) or values.get("device") in (None, "none"):
        return None
    return SimpleNamespace(**values)


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
