"""Floating-point operations and times of a model's forward, counted by torch."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deepspeed.accelerator import get_accelerator
from megatron_core.errors import ConfigError
from megatron_core.parallel.sharding import spec_of

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


def _text(number: float, unit: str, precision: int = 2) -> str:
    scale, prefix = next(((scale, prefix) for scale, prefix in UNITS if number >= scale), (1.0, ""))
    return f"{number / scale:.{precision}f} {prefix}{unit}".rstrip()


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number with the prefix K, M, G or T."""
    return _text(num, "", precision)


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return floating-point operations with a prefix."""
    return _text(flops, "FLOPs", precision)


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return multiplications with additions, with a prefix."""
    return _text(macs, "MACs", precision)


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of parameters with a prefix."""
    return _text(params_num, "", precision)


class FlopsProfiler:
    """Counts matrix products, convolutions and attention (``torch.utils.flop_counter``) between start and end.

    Other operations, which DeepSpeed counts too, are less than a hundredth of a model with matrices; a multiplication
    with an addition is 2 FLOPs.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.flops = self.params = 0
        self.seconds = 0.0
        self.started = False
        self._counter: FlopCounterMode | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin to count."""
        if ignore_list:
            raise ConfigError(f"start_profile(ignore_list={list(ignore_list)}): all modules are counted; remove it")
        self.params = sum(math.prod(spec_of(parameter).global_shape) for parameter in self.model.parameters())
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        get_accelerator().synchronize()
        self.started, self._began = True, time.perf_counter()

    def stop_profile(self) -> None:
        """End counting; the numbers stay until ``end_profile``."""
        if self._counter is None or not self.started:
            return
        get_accelerator().synchronize()
        self.seconds = time.perf_counter() - self._began
        self._counter.__exit__(None, None, None)
        self.flops = self._counter.get_total_flops()
        self.started = False

    def end_profile(self) -> None:
        """Stop, and forget the counts of modules."""
        self.stop_profile()
        self._counter = None

    reset_profile = end_profile

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the operations."""
        return flops_to_string(self.flops) if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return half of the operations."""
        return macs_to_string(self.flops // 2) if as_string else self.flops // 2

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the parameters of the whole model."""
        return params_to_string(self.params) if as_string else self.params

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds."""
        return f"{1000 * self.seconds:.2f} ms" if as_string else self.seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print totals, and with ``detailed`` the operations of each module down to ``module_depth`` (-1: all)."""
        rate = self.flops / self.seconds if self.seconds else 0.0
        lines = [
            f"DeepSpeed flops profiler (counts of torch) of the forward in step {profile_step}",
            f"parameters: {self.get_total_params(True)}; {self.get_total_flops(True)}; {self.get_total_macs(True)}; "
            f"{self.get_total_duration(True)}; {_text(rate, 'FLOPS')}",
        ]
        counts = self._counter.get_flop_counts() if self._counter is not None and detailed else {}
        for name, operations in counts.items():
            depth = name.count(".")
            if name != "Global" and (module_depth < 0 or depth <= module_depth):
                total = sum(operations.values())
                lines.append(f"{'  ' * depth}{name}: {flops_to_string(total)} ({total / max(self.flops, 1):.1%})")
        text = "\n".join(lines)
        if output_file:
            Path(output_file).write_text(f"{text}\n", encoding="utf-8")
        else:
            print(text, flush=True)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return (operations, multiplications with additions, parameters) of a forward, as texts or numbers."""
    if mode != "forward":
        raise ConfigError(f"get_model_profile(mode={mode!r}) must be 'forward'; call the method yourself")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = (torch.ones(input_shape, dtype=like.dtype, device=like.device),)
    profiler = FlopsProfiler(model)
    model.eval()
    with torch.no_grad():
        for _ in range(warm_up):
            model(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        model(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
