"""``zero.Init`` and ``GatheredParameters``: whole weights of parameters that ZeRO 3 keeps in shards."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed.comm.comm import init_distributed
from deepspeed.translation import read_json
from megatron_core.any_model import Engine
from megatron_core.drop_in.unsupported import refused
from megatron_core.errors import ConfigError


class ZeroParamType(Enum):
    """Kinds of parameters; here all are ``PARTITIONED``."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether a parameter of ZeRO 3 is whole; INFLIGHT is not used."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_engines: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""Weak references to the engines of parameters."""
_numbers = count()


def mark_parameters(engine: Engine) -> None:
    """Remember the engine of its parameters; with weights in shards give them ``ds_id``, ``ds_shape``, ``ds_numel`` and
    ``ds_status``.

    ``ds_status`` is AVAILABLE inside of ``GatheredParameters``; forward and backward do not change it.
    """
    reference = weakref.ref(engine)
    if engine.config.parallel.dp_zero_stage == 3:
        vars(engine.module)["ds_external_parameters"] = ds_external_parameters
    for parameter in engine.module.parameters():
        _engines[parameter] = reference
        if engine.config.parallel.dp_zero_stage == 3:
            _mark(parameter)
            bucket = engine.data_parallel.bucket_of(parameter)
            is_whole = bucket is None or not bucket.splits_weights
            vars(parameter)["ds_persist"] = is_whole
            _set_status([parameter], whole=is_whole)


def ds_external_parameters() -> tuple[tuple[str, nn.Parameter], ...]:
    """Return no parameters: registering external ones has no effect."""
    return ()


def engine_of(parameter: nn.Parameter) -> Engine | None:
    """Return the engine that trains the model of ``parameter``."""
    reference = _engines.get(parameter)
    return None if reference is None else reference()


def is_zero_param(parameter: Any) -> bool:
    """Whether ``parameter`` was constructed in ``zero.Init`` or belongs to an engine at stage 3."""
    return hasattr(parameter, "ds_id")


def _mark(parameter: nn.Parameter) -> None:
    if not is_zero_param(parameter):
        values = {"ds_id": next(_numbers), "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
        vars(parameter).update(values, ds_persist=False, ds_active_sub_modules=set())
        _set_status([parameter], whole=True)


def _set_status(parameters: Iterable[nn.Parameter], *, whole: bool) -> None:
    for parameter in parameters:
        vars(parameter)["ds_status"] = ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE


class Init:
    """Context in which the parameters of a model for ZeRO 3 are constructed.

    They have the dtype of the JSON (``fp16``, ``bf16``; else float32), or ``dtype``, or float16 without a JSON. Each
    rank constructs whole weights; ``deepspeed.initialize`` splits them. A model that does not fit can be on the meta
    device (docs/any_model.md). ``module``: a constructed model to mark. Errors: ``ConfigError`` for a group of ranks.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        given = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "sequence_data_parallel_group": sequence_data_parallel_group,
        }
        if enabled and (found := [name for name, value in given.items() if value]):
            raise ConfigError(f"zero.Init: {', '.join(found)} is not supported; remove it")
        self.enabled = enabled
        self.dtype = dtype or _dtype_of(config if config_dict_or_path is None else config_dict_or_path)
        self._stack = ExitStack()
        if enabled and not dist.is_initialized():
            init_distributed()
        for parameter in module.parameters() if enabled and module is not None else ():
            _mark(parameter)

    def __enter__(self) -> "Init":
        if self.enabled:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._stack.callback(torch.set_default_dtype, before)
            self._stack.callback(register_module_parameter_registration_hook(_mark_registered).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()


def _mark_registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        _mark(parameter)


def _dtype_of(config: Any) -> torch.dtype:
    if config is None:
        return torch.float16
    values = read_json(config)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if (values.get(name) or {}).get("enabled") is True:
            return dtype
    return torch.float32


class GatheredParameters:
    """Context in which parameters of ZeRO 3 are whole; all ranks enter it together.

    ``modifier_rank``: the data-parallel rank whose changes are kept on all ranks; None: changes are not kept. Other
    parameters (of an engine below stage 3, or not constructed in ``zero.Init``) stay as they are.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        listed = params.parameters() if isinstance(params, nn.Module) else params
        each: list[nn.Parameter] = [listed] if isinstance(listed, nn.Parameter) else list(listed)
        self.params = list(dict.fromkeys(p for p in each if enabled and is_zero_param(p)))
        self.src_rank = modifier_rank
        if fwd_module is not None:
            for parameter in self.params:
                register_external_parameter(fwd_module, parameter)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for engine, own in self._by_engine():
                stack.enter_context(_kept(own, self.src_rank) if engine is None else self._gathered(engine, own))
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def _by_engine(self) -> Iterator[tuple[Engine | None, list[nn.Parameter]]]:
        engines = list(dict.fromkeys(engine_of(parameter) for parameter in self.params))
        for engine in engines:
            yield engine, [parameter for parameter in self.params if engine_of(parameter) is engine]

    @contextmanager
    def _gathered(self, engine: Engine, own: list[nn.Parameter]) -> Iterator[None]:
        split = [p for p in own if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
        modify = self.src_rank is not None
        with engine.gathered(own, modify=modify, source=self.src_rank or 0):
            _set_status(split, whole=True)
            try:
                yield
            finally:
                _set_status(split, whole=False)


@contextmanager
def _kept(parameters: list[nn.Parameter], source: int | None) -> Iterator[None]:
    """Send the weights of rank ``source`` to all ranks at the end: no engine does it yet."""
    yield
    if source is not None and dist.is_initialized() and dist.get_world_size() > 1:
        for parameter in parameters:
            if not parameter.is_meta:
                whole = parameter.data.contiguous()
                dist.broadcast(whole, source)
                parameter.data.copy_(whole)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Callable[..., torch.Tensor]:
    """Return ``fn`` with a default device, and with the dtype of its floating-point results.

    transformers replaces this function while a model is constructed in ``zero.Init``, which does not call it: here
    ``Init`` sets torch's default dtype, and constructors with a dtype of their own keep it.
    """

    def constructor(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if target_fp_dtype is not None and made.is_floating_point() else made

    return constructor


_orig_torch_arange = torch.arange
"""As transformers reads it."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that the forward of ``module`` reads ``parameter`` of another module.

    The mark has no effect: weights outside of all units are whole during a forward, and those of a unit are gathered
    for the forward of each of its modules. ``RuntimeError`` for other types.
    """
    if not isinstance(parameter, nn.Parameter) or not isinstance(module, nn.Module):
        raise RuntimeError("register_external_parameter needs a module and a parameter")
    vars(module).setdefault("_external_params", {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Remove the mark; ``RuntimeError`` if there is none."""
    if vars(module).get("_external_params", {}).pop(id(parameter), None) is None:
        raise RuntimeError("unregister_external_parameter: the parameter is not registered")


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Return a context in which the weights of an engine's model are whole; it yields ``model``."""
    with GatheredParameters(model.parameters()):
        yield model


INTERNAL = "it is internal to DeepSpeed; use GatheredParameters, and the functions safe_get_* of deepspeed.utils"
MultipleAllGatherHandles = refused("deepspeed.runtime.zero.partition_parameters.MultipleAllGatherHandles", INTERNAL)
InsertPostInitMethodToModuleSubClasses = refused(
    "deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses", INTERNAL
)
CUDAQuantizer = refused("deepspeed.runtime.zero.partition_parameters.CUDAQuantizer", INTERNAL)
zero3_linear_wrap = nn.functional.linear
partitioned_param_data_shape = [0]
"""Shape of the tensor of a parameter that ZeRO 3 keeps in shards."""
