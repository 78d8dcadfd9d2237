"""A JSON configuration of DeepSpeed, read key by key."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from deepspeed.dotted_names import NAMES_OF_TRL, dotted_names, nested
from deepspeed.git_version_info import version
from deepspeed.key_table import Key, find_key, has_enabled, is_section, key_names, leaves
from megatron_core.any_model.elastic_batch import (
    ElasticityConfigError,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from megatron_core.errors import quoted
from megatron_core.foreign_json import NUMBER, whole

AUTO = "auto"
TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FLAGS = (
    *("wall_clock_breakdown", "comms_logger.enabled", "torch_autocast.enabled", "flops_profiler.enabled"),
    *("tensorboard.enabled", "csv_monitor.enabled", "wandb.enabled", "curriculum_learning.enabled"),
    "data_efficiency.data_sampling.curriculum_learning.enabled",
    *("dataloader_drop_last", "managed_gradient_accumulation", "fp16.auto_cast", "zero_optimization.cpu_offload"),
    *("zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero_optimization.cpu_offload_param"),
    "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
)
"""Keys that are true or false, without a setting of the engine."""


class Algorithm(NamedTuple):
    """An optimizer or scheduler of the JSON."""

    name: str
    params: dict[str, Any]


class Layout(NamedTuple):
    """Sizes of the groups of ranks that do not split the batch, or that split it together with the experts."""

    tensor: int
    sequence: int
    expert: int

    @property
    def ranks_of_a_sample(self) -> int:
        """Number of ranks that compute one sample."""
        return self.tensor * self.sequence

    def settings(self) -> dict[str, Any]:
        """Settings of the engine; none for sizes of 1."""
        settings: dict[str, Any] = {}
        if self.tensor > 1:
            settings["tensor_model_parallel_size"] = self.tensor
        if self.sequence > 1:
            # Ulysses: all-to-all exchanges of sequences for heads (Jacobs et al. 2023).
            settings |= {"context_parallel_size": self.sequence, "cp_comm_type": ("a2a",)}
        if self.expert > 1:
            settings["expert_model_parallel_size"] = self.expert
        return settings


class ConfigReader:
    """Reads a configuration and collects its faults."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.faults = values, []  # type: dict[str, Any], list[str]
        self.ignored: dict[str, list[str]] = {}

    def check_keys(self) -> None:
        """Sort all given keys by the table."""
        for name, path in dotted_names(self.values):
            if path in NAMES_OF_TRL and path in self.values:
                self.ignored.setdefault("DeepSpeed does not read a name with a dot as a section", []).append(path)
                continue
            self.faults.append(
                f"{path!r} has a dot in its name, which DeepSpeed does not read as a section; write {nested(name)}"
            )
        for path, value in leaves(self.values):
            key = find_key(path)
            if path.startswith("_"):
                self.ignored.setdefault("names that begin with _ are comments", []).append(path)
            elif (key is None or key.use == "translated") and is_section(path):
                self.faults.append(f"{path}={quoted(value)} must be an object {{...}}")
            elif key is None:
                near = get_close_matches(path, key_names(), 1, 0.7)
                self.faults.append(f"{path} is not a key of DeepSpeed" + (f"; did you mean {near[0]}?" if near else ""))
            elif key.use == "refused":
                if not self._neutral(path, value, key):
                    self.faults.append(f"{path}={quoted(value)} is not supported: {key.text}")
            elif key.use == "without_effect":
                self.ignored.setdefault(key.text, []).append(path)
            elif value == AUTO and path.startswith("zero_optimization."):
                # DeepSpeed drops such values of this section; OpenRLHF leaves them to it.
                self.ignored.setdefault("'auto' without transformers.Trainer is the default", []).append(path)
            elif value == AUTO:
                self.faults.append(
                    f"{path}='auto' has no value: transformers.Trainer and accelerate fill it; set it yourself"
                )

    def _neutral(self, path: str, value: Any, key: Key) -> bool:
        if path.startswith("compression_training."):
            section, switches = self.values["compression_training"], path.split(".")[1]
            return not has_enabled(section.get(switches))
        section = self.get(path.rpartition(".")[0], None)
        top = self.values.get(path.partition(".")[0])
        off = (isinstance(top, Mapping) and "stage" not in top and top.get("enabled") is False) or (
            isinstance(section, Mapping) and section.get("enabled") is False
        )
        return off or not value or value in ("none", AUTO) or str(value) == key.neutral

    def notes(self) -> list[str]:
        """One sentence for each reason."""
        return [f"no effect: {', '.join(paths)} ({reason})" for reason, paths in self.ignored.items()]

    def get(self, path: str, default: Any) -> Any:
        """Value of a dotted path; null and ``"auto"`` (already in the faults or notes) count as absent."""
        value: Any = self.values
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def number(self, path: str, default: float) -> float:
        """A number >= 0."""
        value = self.get(path, default)
        if not NUMBER.accepts(value):
            self.faults.append(f"{path}={quoted(value)} must be {NUMBER.description}")
            return default
        return value

    def integer(self, path: str, default: int, least: int) -> int:
        """An integer >= ``least``; 5e8 is one."""
        value = self.get(path, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not whole(least)(value):
            self.faults.append(f"{path}={quoted(value)} must be an integer >= {least}")
            return default
        return value

    def flag(self, path: str) -> bool:
        """True or false."""
        value = self.get(path, False)
        if not isinstance(value, bool):
            self.faults.append(f"{path}={quoted(value)} must be true or false")
        return value is True

    def check_types(self) -> None:
        """Check the values that the engine reads itself."""
        for path in FLAGS:
            self.flag(path)
        self.integer("pipeline.activation_checkpoint_interval", 0, 0)
        for name, least in (("seed", 0), ("data_sampling.num_epochs", 1), ("data_sampling.num_workers", 0)):
            self.integer(f"data_efficiency.{name}", least, least)
        every = self.get("steps_per_print", 1)
        if every != float("inf"):  # which accelerate sets for no lines at all
            self.integer("steps_per_print", 1, 0)

    def batch(self, ranks: int, counted: int) -> tuple[int, int, int]:
        """Batch, micro-batch and accumulation steps; absent ones follow from the others, as in DeepSpeed.

        ``ranks``: those with batches of their own; the batch is that of these ranks. ``counted``: the number of ranks
        by which the batch of the JSON is divided.
        """
        if elasticity_enabled(self.values):
            if any(name in self.values for name in TRIPLE) and not self.flag(
                "elasticity.ignore_non_elastic_batch_info"
            ):
                raise ElasticityConfigError(
                    f"elasticity.enabled chooses the batch: remove {', '.join(TRIPLE)}, or set "
                    "elasticity.ignore_non_elastic_batch_info to true"
                )
            ensure_immutable_elastic_config(self.values["elasticity"])
            whole_batch, _, size = compute_elastic_config(self.values, version, ranks)
            return whole_batch, size, whole_batch // (size * ranks)
        given = [self.integer(name, 1, 1) if self.get(name, None) is not None else None for name in TRIPLE]
        batch, micro, steps = given
        if batch is None and micro is None:
            self.faults.append(f"{TRIPLE[0]} or {TRIPLE[1]} must be given")
            return 1, 1, 1
        if batch is None:
            assert micro is not None
            return micro * (steps or 1) * ranks, micro, steps or 1
        if micro is None:
            micro = batch // counted // (steps or 1)
            steps = steps or 1
        elif steps is None:
            steps = batch // micro // counted
        if batch != micro * steps * counted and (None in given or batch != micro * steps * ranks):
            shown = ", ".join(f"{name}={value}" for name, value in zip(TRIPLE, given, strict=True) if value is not None)
            self.faults.append(
                f"{shown} on {counted} ranks contradict: {TRIPLE[0]} must be {TRIPLE[1]} x {TRIPLE[2]} x ranks; "
                "correct or omit one of them"
            )
        return micro * steps * ranks, micro, steps

    def precision(self) -> dict[str, Any]:
        """Settings of fp16, bf16 and the dtype of communication."""
        fp16, bf16 = self.flag("fp16.enabled"), self.flag("bf16.enabled") or self.flag("bfloat16.enabled")
        if self.flag("torch_autocast.enabled"):
            if fp16 or bf16:
                self.faults.append(
                    "torch_autocast.enabled contradicts fp16.enabled and bf16.enabled; enable one of them"
                )
            dtype = str(self.get("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
            if dtype not in ("bfloat16", "bf16"):
                self.faults.append(f"torch_autocast.dtype={dtype!r} is not supported: use 'bfloat16', or fp16.enabled")
        if fp16 and bf16:
            self.faults.append("fp16.enabled and bf16.enabled contradict; enable one of them")
        found: dict[str, Any] = {"fp16": fp16, "bf16": bf16}
        sent = self.get("communication_data_type", None)
        if sent in ("bf16", "bfp16"):
            found["grad_reduce_in_bf16"] = True
        elif sent == "fp16":
            self.ignored["gradients are sent in float32, which is more exact"] = ["communication_data_type"]
        elif sent not in (None, "fp32"):
            self.faults.append(f"communication_data_type={quoted(sent)} must be 'fp32', 'fp16' or 'bf16'")
        if not fp16:
            return found
        if constant := self.number("fp16.loss_scale", 0):
            return {**found, "loss_scale": float(constant)}
        return {
            **found,
            "initial_loss_scale": 2.0 ** min(self.integer("fp16.initial_scale_power", 16, 0), 1000),
            "loss_scale_window": self.integer("fp16.loss_scale_window", 1000, 1),
            "hysteresis": self.integer("fp16.hysteresis", 2, 1) if self.get("zero_optimization.stage", 0) else 1,
            "min_loss_scale": float(self.number("fp16.min_loss_scale", 1)),
        }

    def layout(self, ranks: int) -> Layout:
        """Sizes of tensor, sequence and expert parallelism among ``ranks`` ranks."""
        # AutoTP has 0 for "off".
        tensor = max(self.integer("tensor_parallel.autotp_size", 1, 0), 1)
        sequence = self.integer("sequence_parallel_size", 1, 1)
        expert = self.integer("expert_parallel.autoep_size", 1, 1) if self.flag("expert_parallel.enabled") else 1
        shown = f"tensor_parallel.autotp_size={tensor} x sequence_parallel_size={sequence}"
        if ranks % (tensor * sequence):
            self.faults.append(f"{shown} must be a divisor of the {ranks} ranks; change one of them")
            return Layout(1, 1, 1)
        if ranks // tensor % expert:
            self.faults.append(
                f"expert_parallel.autoep_size={expert} must be a divisor of {ranks // tensor}, the number of ranks "
                "without tensor parallelism; change it"
            )
            return Layout(tensor, sequence, 1)
        return Layout(tensor, sequence, expert)

    def zero(self, ranks: int) -> dict[str, Any]:
        """Settings of ``zero_optimization``; ``ranks``: those over which gradients are summed."""
        name = "zero_optimization"
        stage = self.integer(f"{name}.stage", 0, 0)
        if stage > 3:
            self.faults.append(f"{name}.stage={stage} must be 0, 1, 2 or 3")
        found: dict[str, Any] = {"zero_stage": stage}
        size = self.integer(f"{name}.reduce_bucket_size", 500_000_000, 1)
        overlaps = self.flag(f"{name}.overlap_comm")
        prefetched = self.integer(f"{name}.stage3_prefetch_bucket_size", 50_000_000, 0)
        prefetched = self.integer(f"{name}.prefetch_bucket_size", prefetched, 0)
        if ranks > 1:
            found |= {"ddp_bucket_size": size, "overlap_grad_reduce": overlaps}
        threshold = self.integer(f"{name}.stage3_param_persistence_threshold", 100_000, 0)
        threshold = self.integer(f"{name}.param_persistence_threshold", threshold, 0)
        if ranks > 1 and stage == 3:
            found["zero3_param_persistence_threshold"] = threshold
            # DeepSpeed has the key on at stage 3 without it. Only the gathers follow here: they give equal bits, while
            # overlapped sums of gradients forbid a second backward in the last micro-batch.
            found["overlap_param_gather"] = prefetched > 0 and self.get(f"{name}.overlap_comm", True) is True
        offload = self._offload_optimizer(stage) | self._offload_param(stage)
        return found | self._hpz(stage, ranks) | offload | self._quantized(stage, ranks)

    def _quantized(self, stage: int, ranks: int) -> dict[str, Any]:
        name = "zero_optimization.zero_quantized"
        kinds = {"gradients": "int4-gradients", "weights": "int8-weights"}
        chosen = [value for key, value in kinds.items() if self.flag(f"{name}_{key}")]
        if "int8-weights" in chosen and stage != 3:
            self.faults.append(f"{name}_weights=true needs zero_optimization.stage 3; set it to false")
        return {"grad_compression": "-".join(chosen)} if chosen and ranks > 1 else {}

    def _hpz(self, stage: int, ranks: int) -> dict[str, Any]:
        name = "zero_optimization.zero_hpz_partition_size"
        size = self.integer(name, 1, 1)
        if size == 1:
            return {}
        if stage != 3 or ranks % size:
            self.faults.append(f"{name}={size} needs stage 3, and must be a divisor of the {ranks} ranks")
            return {}
        # Hybrid sharding has the gathers of ZeRO++ within a node; it keeps no second copy of the shards of all ranks.
        return {"num_distributed_optimizer_instances": ranks // size}

    def _offload_optimizer(self, stage: int) -> dict[str, Any]:
        device = self._device("offload_optimizer", "nvme", "cpu")
        if device == "none":
            return {}
        if not stage:
            self.faults.append("zero_optimization.offload_optimizer needs zero_optimization.stage 1, 2 or 3")
        if device == "nvme":
            return {"optimizer_offload_dir": self._folder("offload_optimizer")}
        ratio = self.number("zero_optimization.offload_optimizer.ratio", 1.0)
        if not 0 < ratio <= 1:
            self.faults.append(f"zero_optimization.offload_optimizer.ratio={ratio} must be above 0 and at most 1")
        return {"optimizer_cpu_offload": True} | ({"optimizer_offload_fraction": float(ratio)} if ratio != 1 else {})

    def _offload_param(self, stage: int) -> dict[str, Any]:
        device = self._device("offload_param", "nvme", "cpu")
        if device == "none":
            return {}
        if stage != 3:  # no effect in DeepSpeed either; accelerate's launcher asks for both
            self.ignored["weights are in shards at zero_optimization.stage 3 only"] = [
                "zero_optimization.offload_param"
            ]
            return {}
        if device == "cpu":
            return {"zero3_param_cpu_offload": True}
        return {"zero3_param_offload_dir": self._folder("offload_param")}

    def _device(self, section: str, *known: str) -> str:
        device = self.get(f"zero_optimization.{section}.device", "none")
        if device not in ("none", *known):
            self.faults.append(f"zero_optimization.{section}.device={quoted(device)} must be one of none, cpu and nvme")
            return "none"
        return str(device)

    def _folder(self, section: str) -> str | None:
        path = self.get(f"zero_optimization.{section}.nvme_path", None)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            self.faults.append(f"zero_optimization.{section}.device='nvme' needs nvme_path, the name of a folder")
            return None
        return os.fspath(path)

    def algorithm(self, section: str) -> Algorithm | None:
        """Type and params of ``optimizer`` or ``scheduler``."""
        name, params = self.get(f"{section}.type", None), self.get(f"{section}.params", {})
        if not isinstance(params, Mapping):
            self.faults.append(f"{section}.params={quoted(params)} must be an object {{...}}")
            params = {}
        if name is not None and not isinstance(name, str):
            self.faults.append(f"{section}.type={quoted(name)} must be a name")
        if name is None and params:
            self.faults.append(f"{section}.params is given without {section}.type; add the type")
        return None if name is None else Algorithm(str(name), dict(params))
