"""Settings of ``megatron_core.initialize`` as DeepSpeed's JSON configuration."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.optimizers import LAMB_FACTORS, LOCAL_STEPS
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.text_file import read_table

PATHS: dict[str, str] = read_table(__file__)
PATHS |= {f"onebit_lamb_{name}": f"optimizer.params.{name}" for name in LAMB_FACTORS}
PATHS |= {f"zero_one_{name}": f"optimizer.params.{name}" for name in LOCAL_STEPS}
"""Settings with the same value under another name."""
TYPES = {"adam": "AdamW", "lion": "Lion", "sgd": "SGD", "lamb": "Lamb"}
COMPRESSED = {
    ("adam", "onebit-adam"): "OneBitAdam",
    ("lamb", "onebit-lamb"): "OneBitLamb",
    ("adam", "zero-one-adam"): "ZeroOneAdam",
}
"""Types by optimizer and compression."""
FOLDERS = {"optimizer_offload_dir": "offload_optimizer", "zero3_param_offload_dir": "offload_param"}


USES: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "sgd_": lambda settings: settings["optimizer"] == "sgd",
    "lion_": lambda settings: settings["optimizer"] == "lion",
    "lamb_": lambda settings: settings["optimizer"] == "lamb",
    "adam_": lambda settings: settings["optimizer"] in ("adam", "lamb"),
    "onebit_lamb_": lambda settings: settings["grad_compression"] == "onebit-lamb",
    "zero_one_": lambda settings: settings["grad_compression"] == "zero-one-adam",
    "grad_compression_warmup": lambda settings: settings["grad_compression"] in ("onebit-adam", "onebit-lamb"),
    "optimizer_offload_fraction": lambda settings: settings["optimizer_cpu_offload"],
    **dict.fromkeys(("loss_scale", "initial_loss_scale", "hysteresis", "min_loss_scale"), lambda s: s["fp16"]),
}
"""Beginnings of names -> whether these settings have an effect."""


BETAS = {"adam": ("adam_beta1", "adam_beta2"), "lion": ("lion_beta1", "lion_beta2")}
PERSISTENCE_THRESHOLD = 100_000
"""Without the key."""
SWITCHES = ("grad_reduce_in_bf16", "optimizer_cpu_offload", "zero3_param_cpu_offload")
OTHERS = ("initial_loss_scale", "optimizer", "grad_compression", "adam_bias_correction", "zero_one_var_freeze_step")
KEYS = {*PATHS, *FOLDERS, *SWITCHES, *OTHERS, *BETAS["adam"], *BETAS["lion"], "lamb_bias_correction"}
"""Settings with a key of DeepSpeed; they are written with their default too, because DeepSpeed's differs."""


def of_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run's file without those that have their default and no effect with the others."""
    defaults = RunConfig().flat()
    whole = {**defaults, **settings}
    unused = tuple(start for start, is_used in USES.items() if not is_used(whole))
    written = {
        name: value
        for name, value in settings.items()
        if value != defaults[name] or (name in KEYS and not name.startswith(unused))
    }
    for pair in BETAS.values():
        if not written.keys().isdisjoint(pair):  # DeepSpeed has one key for both
            written |= {name: whole[name] for name in pair}
    return written


def to_deepspeed(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON configuration whose translation is ``settings``, and the settings without a key in it.

    Errors: ``ConfigError`` with all settings that contradict DeepSpeed's JSON.
    """
    found: dict[str, Any] = {}
    faults: list[str] = []
    left = {name: value for name, value in settings.items() if value is not None}
    for name, path in PATHS.items():
        if name in left:
            _put(found, path, left.pop(name))
    if "initial_loss_scale" in left:
        power = math.log2(left.pop("initial_loss_scale"))
        if not power.is_integer():
            faults.append("initial_loss_scale must be a power of 2")
        _put(found, "fp16.initial_scale_power", round(power))
    if left.pop("grad_reduce_in_bf16", False):
        found["communication_data_type"] = "bf16"
    if left.pop("optimizer_cpu_offload", False):
        _put(found, "zero_optimization.offload_optimizer.device", "cpu")
    if left.pop("zero3_param_cpu_offload", False):
        _put(found, "zero_optimization.offload_param.device", "cpu")
    for name, section in FOLDERS.items():
        if name in left:
            _put(found, f"zero_optimization.{section}", {"device": "nvme", "nvme_path": left.pop(name)})
    _layout(found, left)
    _optimizer(found, left, faults)
    if faults:
        raise ConfigError("; ".join(faults))
    return found, left


def _layout(found: dict[str, Any], left: dict[str, Any]) -> None:
    """Translate sizes of groups, and the overlap of gathers at stage 3."""
    if left.get("tensor_model_parallel_size", 1) > 1:
        size = left.pop("tensor_model_parallel_size")
        _put(found, "tensor_parallel.autotp_size", size)
        if "train_batch_size" in found:  # DeepSpeed counts the micro-batches of all ranks
            found["train_batch_size"] *= size
    if left.get("expert_model_parallel_size", 1) > 1:
        size = left.pop("expert_model_parallel_size")
        _put(found, "expert_parallel", {"enabled": True, "autoep_size": size})
    if left.get("context_parallel_size", 1) > 1 and list(left.get("cp_comm_type", ())) == ["a2a"]:
        found["sequence_parallel_size"] = left.pop("context_parallel_size")
        left.pop("cp_comm_type")
    zero = found.get("zero_optimization", {})
    if zero.get("stage") != 3:
        return
    threshold = left.pop("zero3_param_persistence_threshold", 0)
    if threshold != PERSISTENCE_THRESHOLD:
        zero["stage3_param_persistence_threshold"] = threshold
    if "overlap_param_gather" not in left:
        return
    gathers = left.pop("overlap_param_gather")
    sums = zero.get("overlap_comm", False)
    if gathers and not sums:
        zero.pop("overlap_comm", None)
    elif sums and not gathers:
        zero["stage3_prefetch_bucket_size"] = 0


def _optimizer(found: dict[str, Any], left: dict[str, Any], faults: list[str]) -> None:
    kind = left.pop("optimizer", "adam" if "optimizer" in found else None)
    compression = left.pop("grad_compression", "none")
    if kind is None:
        return
    name = TYPES.get(kind) if compression == "none" else COMPRESSED.get((kind, compression))
    if name is None:
        faults.append(f"optimizer={kind} with grad_compression={compression} has no name in DeepSpeed's JSON")
        return
    _put(found, "optimizer.type", name)
    _bias_correction(found, name, left, faults)
    if "zero_one_var_freeze_step" in left:
        _put(found, "optimizer.params.var_freeze_step", left.pop("zero_one_var_freeze_step") - 1)
    kind = "adam" if kind == "lamb" else kind
    betas = [left.pop(f"{kind}_beta{each}", None) for each in (1, 2)]
    if None not in betas:
        _put(found, "optimizer.params.betas", betas)
    elif betas != [None, None]:
        faults.append(f"give both {kind}_beta1 and {kind}_beta2, or neither")


def _bias_correction(found: dict[str, Any], name: str, left: dict[str, Any], faults: list[str]) -> None:
    """Translate the bias correction; DeepSpeed's 1-bit optimizers have none."""
    adam, lamb = left.pop("adam_bias_correction", True), left.pop("lamb_bias_correction", "moments")
    if name == "Lamb" and lamb == "moments":
        faults.append("lamb_bias_correction=moments has no key in DeepSpeed's JSON; use rate")
    if name == "OneBitAdam" and adam:
        faults.append("adam_bias_correction=True with onebit-adam has no key in DeepSpeed's JSON; use False")
    if (name == "Lamb" and lamb == "none") or (name == "AdamW" and not adam):
        _put(found, "optimizer.params.bias_correction", False)


def _put(found: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for each in sections:
        found = found.setdefault(each, {})
    found[name] = value
