"""Ranks of accelerate on CPUs, with DeepSpeed or Megatron-LM.

accelerate has backends of these for GPUs only. On a CPU it takes each rank for a job of its own, or trains without the
package that the program asks for, and says nothing.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_core.drop_in.after_import import run_after_import
from megatron_core.drop_in.cpu_start import DEVICES
from megatron_core.errors import ConfigError
from megatron_core.launcher import describe_one_rank


def adapt_accelerate() -> None:
    """Let accelerate find the ranks of the drop-in's packages, once it is imported."""
    run_after_import("accelerate.state", _patch_states)
    run_after_import("accelerate.accelerator", _patch_saving)
    run_after_import("accelerate.commands.launch", _patch_launcher)
    run_after_import("accelerate.utils.dataclasses", _patch_plugins)
    run_after_import("accelerate.utils.megatron_lm", _patch_megatron)


def _is_requested(name: str) -> bool:
    """Whether a plugin of the program, or the launcher, requests ``DEEPSPEED`` or ``MEGATRON_LM``."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1")


def _patch_states() -> None:
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    prepare = PartialState._prepare_backend

    @functools.wraps(prepare)
    def _prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = prepare(self, *args, **kwargs)
        cpu = inspect.signature(prepare).bind(self, *args, **kwargs).arguments.get("cpu", False)
        if kind is not DistributedType.NO or cpu:
            return backend, kind
        if DEVICES in os.environ and "LOCAL_RANK" in os.environ:  # the program asks for GPUs, which are CPUs here
            return "gloo", DistributedType.MULTI_GPU
        if _is_requested("DEEPSPEED"):
            describe_one_rank()
            return "gloo", kind
        return backend, kind

    PartialState._prepare_backend = _prepare_backend
    PartialState.__init__ = _with_deepspeed_on_cpus(PartialState.__init__)
    AcceleratorState.__init__ = _checked(_with_deepspeed_on_cpus(AcceleratorState.__init__))


def _with_deepspeed_on_cpus(initialize: Callable[..., None]) -> Callable[..., None]:
    """Without ``cpu=True`` if DeepSpeed is requested: accelerate would train without it. There is no GPU to avoid."""
    from accelerate.state import PartialState

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(initialize).bind(self, *args, **kwargs).arguments
        options = {**arguments.pop("kwargs", {}), **arguments}
        options.pop("self")
        if _is_requested("DEEPSPEED"):
            if options.get("cpu") or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1"):
                _refuse_hidden_gpus()
                os.environ.pop("ACCELERATE_USE_CPU", None)
                options["cpu"] = False
            if PartialState._shared_state and PartialState._shared_state["backend"] is None:
                PartialState._reset_state()  # made before DeepSpeed was requested, as a job of one rank
        initialize(self, **options)

    return __init__


def _refuse_hidden_gpus() -> None:
    import torch

    if torch.cuda.is_available():
        raise ConfigError(
            "accelerate has cpu=True (use_cpu, --cpu) and DeepSpeed, but this machine has a GPU, which DeepSpeed's "
            "engine would use; set CUDA_VISIBLE_DEVICES='' to train on the CPU, or leave out cpu=True"
        )


def _checked(initialize: Callable[..., None]) -> Callable[..., None]:
    """An error if accelerate ignores the plugin for Megatron-LM, which it has for GPUs only."""
    from accelerate.state import DistributedType

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        client = sys.modules.get("accelerate.utils.megatron_lm")
        if _is_requested("MEGATRON_LM") and not hasattr(client, "mpu"):
            raise ConfigError(
                "accelerate was imported without ACCELERATE_USE_MEGATRON_LM=true, so that its MegatronLMPlugin cannot "
                "work; set this environment variable before the import, or start the program with accelerate launch "
                "--use_megatron_lm"
            )
        initialize(self, *args, **kwargs)
        if _is_requested("MEGATRON_LM") and self.distributed_type is not DistributedType.MEGATRON_LM:
            raise ConfigError(
                f"accelerate ignores its MegatronLMPlugin for the distributed type {self.distributed_type.value}; "
                "start the ranks with torchrun (also a single one), without cpu=True, and on a machine without GPUs "
                "with -m megatron_core.drop_in --cpu"
            )

    return __init__


def _patch_saving() -> None:
    """Save whole layers: accelerate knows ``autotp_size`` alone, and would save one rank's experts."""
    from accelerate.accelerator import Accelerator

    get_state_dict = Accelerator.get_state_dict

    @functools.wraps(get_state_dict)
    def get(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(model, "has_split_layers") and model.has_split_layers():
            return model._consolidated_16bit_state_dict()
        return get_state_dict(self, model, *args, **kwargs)

    Accelerator.get_state_dict = get


def _patch_plugins() -> None:
    """Let the plugin for FSDP find a device with ``--cpu``: it needs one for ``sync_module_states``."""
    from accelerate.utils import dataclasses

    if DEVICES in os.environ:
        dataclasses.is_cuda_available = lambda: True


def _patch_megatron() -> None:
    """Results of ``train_step`` as accelerate reads them: those of releases of Megatron-LM up to 0.19."""
    from accelerate.utils import megatron_lm

    train_step = getattr(megatron_lm, "train_step", None)
    if train_step is None:  # accelerate imports it if ACCELERATE_USE_MEGATRON_LM is set
        return

    @functools.wraps(train_step)
    def take_step(*args: Any, **kwargs: Any) -> Any:
        return train_step(*args, **kwargs)[:7]

    megatron_lm.train_step = take_step


def _patch_launcher() -> None:
    """An error if ``accelerate launch --cpu`` ignores the DeepSpeed of its configuration file; ranks on "GPUs"."""
    from accelerate.commands import launch

    simple_launcher = launch.simple_launcher

    @functools.wraps(simple_launcher)
    def start(args: Any) -> Any:
        for name in ("deepspeed", "megatron_lm"):
            if args.cpu and getattr(args, f"use_{name}", False):
                raise ConfigError(
                    f"accelerate launch --cpu starts the program without the {name} of the configuration file; leave "
                    "out --cpu: on a machine without GPUs the drop-in trains on the CPU"
                )
        if DEVICES in os.environ and (args.num_processes or 1) > 1 and not args.cpu:
            return launch.multi_gpu_launcher(args)  # accelerate finds no GPU, and would start one process
        return simple_launcher(args)

    launch.simple_launcher = start
