"""``deepspeed.init_inference``: a model in evaluation mode, split over tensor-parallel ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import init_distributed
from deepspeed.translation import read_json
from deepspeed.utils.logging import log_dist
from megatron_core.any_model import parallelize
from megatron_core.any_model.arguments import check_model
from megatron_core.errors import ConfigError, quoted

WITHOUT_EFFECT = (
    *("replace_with_kernel_inject", "kernel_inject", "replace_method", "max_out_tokens", "max_tokens", "use_triton"),
    *("min_out_tokens", "min_tokens", "triangular_masking", "tm", "return_tuple", "triton_autotune", "transposed_mode"),
    *("keep_module_on_host", "training_mp_size", "set_empty_params", "injection_policy", "injection_dict"),
    *("injection_policy_tuple", "enable_cuda_graph"),
)
"""Keys that choose kernels, their memory, or layers to split: the model computes with torch, and has its own plan."""
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class InferenceEngine(nn.Module):
    """Runs ``module``, which each of the tensor-parallel ranks calls with the same arguments.

    Errors: ``ConfigError`` for a key that is unknown, or has no meaning here.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        super().__init__()
        keys = {name: value for name, value in config.items() if value is not None}
        dtype = keys.pop("dtype", torch.float16)
        if isinstance(dtype, str):
            dtype = getattr(torch, {"fp16": "half", "fp32": "float", "bf16": "bfloat16"}.get(dtype, dtype), dtype)
        if dtype not in DTYPES:
            raise ConfigError(f"init_inference: dtype={quoted(str(dtype))} is not supported: use float16 or bfloat16")
        section = keys.pop("tensor_parallel", keys.pop("tp", {}))
        size = keys.pop("mp_size", 1)
        if isinstance(section, Mapping) and section.get("enabled", True):
            size = section.get("tp_size", size)
        ignored = [name for name in WITHOUT_EFFECT if keys.pop(name, False)]
        if refused := {name: value for name, value in keys.items() if value}:
            shown = ", ".join(f"{name}={quoted(value)}" for name, value in refused.items())
            raise ConfigError(
                f"init_inference: {shown} is not supported: load weights before, remove the key, or use megatron-serve"
            )
        init_distributed()
        if ignored:
            log_dist(f"init_inference: no effect: {', '.join(ignored)} (the model computes with torch)", ranks=[0])
        module = model.to(get_accelerator().current_device_name(), dtype).eval()
        self.module = parallelize(module, tensor=size) if size > 1 else module
        self.mp_world_size, self.dtype = size, dtype

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine, or of the model: ``generate``, ``config`` and others."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor | Any:
        """Run the model without gradients."""
        return self.module(*inputs, **kwargs)


def init_inference(model: nn.Module, config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> InferenceEngine:
    """Return an engine that runs ``model`` in ``dtype`` (default: float16) on ``tensor_parallel.tp_size`` ranks.

    ``config`` or a JSON file, and ``kwargs``, have keys of DeepSpeed's inference configuration.
    """
    check_model(model)
    keys = {} if config is None else read_json(config)
    different = [name for name in kwargs if keys.get(name, kwargs[name]) != kwargs[name]]
    if different:
        raise ConfigError(f"init_inference: {', '.join(different)} in config and as an argument differ; give one")
    return InferenceEngine(model, {**keys, **kwargs})
