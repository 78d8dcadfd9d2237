"""Settings of ``megatron_core.initialize`` as DeepSpeed's JSON configuration."""

import math
from collections.abc import Mapping
from typing import Any

from deepspeed.optimizers import LAMB_FACTORS, LOCAL_STEPS
from megatron_core.errors import ConfigError

PATHS = {
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "clip_grad": "gradient_clipping",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
    "loss_scale": "fp16.loss_scale",
    "loss_scale_window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "min_loss_scale": "fp16.min_loss_scale",
    "zero_stage": "zero_optimization.stage",
    "ddp_bucket_size": "zero_optimization.reduce_bucket_size",
    "overlap_grad_reduce": "zero_optimization.overlap_comm",
    "optimizer_offload_fraction": "zero_optimization.offload_optimizer.ratio",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "adam_eps": "optimizer.params.eps",
    "sgd_momentum": "optimizer.params.momentum",
    "grad_compression_warmup_iters": "optimizer.params.freeze_step",
    "lamb_max_coeff": "optimizer.params.max_coeff",
    "lamb_min_coeff": "optimizer.params.min_coeff",
    **{f"onebit_lamb_{name}": f"optimizer.params.{name}" for name in LAMB_FACTORS},
    **{f"zero_one_{name}": f"optimizer.params.{name}" for name in LOCAL_STEPS},
}
"""Settings with the same value under another name."""
TYPES = {"adam": "AdamW", "lion": "Lion", "sgd": "SGD", "lamb": "Lamb"}
COMPRESSED = {
    ("adam", "onebit-adam"): "OneBitAdam",
    ("lamb", "onebit-lamb"): "OneBitLamb",
    ("adam", "zero-one-adam"): "ZeroOneAdam",
}
"""Types by optimizer and compression."""
FOLDERS = {"optimizer_offload_dir": "offload_optimizer", "zero3_param_offload_dir": "offload_param"}


def to_deepspeed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON configuration whose translation is ``settings``.

    Errors: ``ConfigError`` with all settings that DeepSpeed's JSON cannot express.
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
    _optimizer(found, left, faults)
    faults += [f"{name}={value!r} has no key in DeepSpeed's JSON; remove it" for name, value in left.items()]
    if faults:
        raise ConfigError("; ".join(faults))
    return found


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
