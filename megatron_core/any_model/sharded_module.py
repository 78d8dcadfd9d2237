"""``megatron_core.fully_shard``: the interface of torch's FSDP2 over this project's units."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Shard

from megatron_core.any_model.data import cast_floating
from megatron_core.any_model.row_shards import ParameterRows, ShardChoices
from megatron_core.any_model.row_units import RowUnits
from megatron_core.errors import ConfigError
from megatron_core.parallel.compiled import is_compiled
from megatron_core.parallel.groups import ALONE, SHARED_MEMORY, Group
from megatron_core.parallel.rank_local import RankLocal
from megatron_core.parallel.transports import transport

_SHARED: RankLocal[dict[Any, Group]] = RankLocal(dict)
"""Groups of shared memory by the world whose ranks they connect."""


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of ``module`` over the ranks of ``mesh`` in place, as torch's FSDP2 does; return it.

    Call it for the inner modules first, then for the model. Parameters become DTensors of rows, for any torch
    optimizer, ``clip_grad_norm_`` and ``torch.distributed.checkpoint``. Each module is a unit, whose weights are
    gathered for its forward and backward. Gradients are averaged. Arguments are those of
    ``torch.distributed.fsdp.fully_shard``; docs/from_fsdp.md lists the differences. Errors: ``ConfigError``.
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    _check(modules, dp_mesh_dims)
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ConfigError(
            f"fully_shard: reshard_after_forward={reshard_after_forward!r} is not supported; give True, False or None"
        )
    if not dist.is_initialized() and mesh is None:
        dist.init_process_group()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = mesh or init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.ndim > 2:
        raise ConfigError(f"fully_shard: mesh has {mesh.ndim} dims; give (shard) or (replicate, shard)")
    is_cpu = mesh.device_type == "cpu"
    choices = ShardChoices(
        modules,
        mesh,
        torch.device("cpu") if is_cpu else torch.device(mesh.device_type, torch.cuda.current_device()),
        _group_of(mesh),
        mp_policy or MixedPrecisionPolicy(),
        reshard_after_forward,
        instances=mesh.get_group(0) if mesh.ndim == 2 else ALONE,
        keeps_on_host=isinstance(offload_policy, CPUOffloadPolicy) and not is_cpu,
    )
    _shard_parameters(choices, ignored_params or set(), shard_placement_fn)
    for inner in modules:
        _wrap(inner, choices)
    return module


def _check(modules: Sequence[nn.Module], dims: object) -> None:
    """ConfigError for arguments that have no counterpart."""
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError("fully_shard: module must be an nn.Module or a list of them")
    if dims is not None:
        raise ConfigError("fully_shard: dp_mesh_dims is not supported; give the data-parallel mesh as mesh")
    for module in modules:
        name = type(module).__name__
        if isinstance(module, TorchFSDPModule):
            raise ConfigError(f"fully_shard: {name} is sharded already; call it once for each module")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise ConfigError(f"fully_shard: {name} has no forward; shard its entries")
        inner = next((child for child in module.modules() if is_compiled(child)), None)
        if inner is not None:
            _refuse_graphs(inner)


def _refuse_graphs(module: nn.Module) -> NoReturn:
    raise ConfigError(
        f"fully_shard: {type(module).__name__} is compiled, and graphs cannot gather weights; remove compile(), or use "
        'megatron_core.initialize with {"zero_stage": 3, "compile": True}'
    )


def _group_of(mesh: DeviceMesh) -> Group:
    """Return the ranks that share rows: over shared memory if these are all ranks of the job, on one machine."""
    group = mesh.get_group(mesh.ndim - 1)
    module = transport(SHARED_MEMORY)
    world = dist.group.WORLD
    if mesh.device_type != "cpu" or group.size() != dist.get_world_size() or module is None or group.size() == 1:
        return group
    if dist.get_backend(group) != "gloo":
        return group
    groups = _SHARED()
    if world not in groups:
        groups.clear()
        module.register()
        groups[world] = dist.new_group(backend=SHARED_MEMORY)
    return groups[world]


def _shard_parameters(
    choices: ShardChoices,
    ignored: set[nn.Parameter],
    placement: Callable[[nn.Parameter], Shard | None] | None,
) -> None:
    """Replace the parameters of ``choices.modules`` that no earlier call has sharded by DTensors of rows."""
    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for module in choices.modules:
        inner_units = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
        sharded = {row.sharded for inner in inner_units for row in _choices_of(inner).rows}
        for path, inner in module.named_modules():
            for name, parameter in inner._parameters.items():
                if parameter is None or parameter in ignored or parameter in sharded:
                    continue
                full_name = f"{path}.{name}".lstrip(".")
                if isinstance(parameter, DTensor):
                    raise ConfigError(
                        f"fully_shard: {full_name} is a DTensor already, whose gradients would not be summed over "
                        "the ranks; shard it first, or name it in ignored_params"
                    )
                slots.setdefault(parameter, []).append((inner, name))
                names.setdefault(parameter, full_name)
        for tensor in [*module.buffers()]:
            if not tensor.is_meta:
                tensor.data = tensor.data.to(choices.device)
    for parameter, places in slots.items():
        name = names[parameter]
        if not parameter.dim():
            raise ConfigError(f"fully_shard: {name} has no dims, so it has no rows; make it a tensor of one element")
        if type(parameter) is not nn.Parameter:
            raise ConfigError(
                f"fully_shard: {name} is a {type(parameter).__name__}, whose rows cannot be gathered; use nn.Parameter"
            )
        wanted = placement(parameter) if placement is not None else None
        if wanted not in (None, Shard(0)):
            raise ConfigError(f"fully_shard: shard_placement_fn returns {wanted!r} for {name}; only Shard(0) is legal")
        choices.rows.append(ParameterRows(name, parameter, list(dict.fromkeys(places)), choices))


class FSDPModule(TorchFSDPModule):
    """Methods that ``fully_shard`` adds to a module; those of torch's FSDP2 that are not here raise ``ConfigError``."""

    _orig_cls_mro_index = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class, as slices of containers do."""
        original: Any = cls.__mro__[cls._orig_cls_mro_index]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ConfigError("copy.deepcopy of a module of fully_shard: copy it before, or its state_dict()")

    def unshard(self, async_op: bool = False) -> Any:
        """Gather the weights of this module's unit, until its forward or ``reshard``."""
        units = _units_of(self)
        return units.unshard(_choices_of(self), wait=not async_op)

    def reshard(self) -> None:
        """Free the whole weights of this module's unit."""
        units = vars(_outermost(self)).get("_row_units")
        if units is not None:
            units.reshard(_choices_of(self))

    def reset_iter_state(self) -> None:
        """Free all weights and discard gradients that have not been summed, after an error in a step."""
        _units_of(self).reset()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether a backward sums gradients over the ranks, or keeps them for a later one."""
        self._set(recurse, sums_gradients=requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether weights are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward={reshard_after_forward!r} must be True or False")
        self._set(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether weights are freed after a backward; they must be, before the optimizer's step."""
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters without a gradient on this rank take part in sums: ranks may run other modules."""
        self._set(recurse, sums_unused=reduce_scatter_unused_params)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by ``factor`` instead of the number of ranks."""
        self._set(False, divisor=factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Refuse sums over the shards alone; without hybrid sharding there is nothing to do."""
        if not requires_all_reduce and _choices_of(self).instances.size() > 1:
            raise ConfigError("set_requires_all_reduce(False) is not supported; use set_requires_gradient_sync(False)")

    def _set(self, recurse: bool, **values: Any) -> None:
        module: Any = self
        for inner in module.modules() if recurse else [module]:
            if isinstance(inner, FSDPModule):
                vars(_choices_of(inner)).update(values)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the DTensors, not gathered weights."""
        self.reshard()
        module: Any = super(TorchFSDPModule, self)
        return module._apply(*args, **kwargs)

    def _get_fsdp_state(self) -> Any:
        """Return what ``register_fsdp_forward_method`` of torch calls around a method."""
        return _Forward(self)


HINTS = (
    *("set_is_last_backward", "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
    *("set_post_optim_event", "set_unshard_in_backward", "set_force_sum_reduction_for_comms"),
    *("set_reduce_scatter_max_input_buffers", "set_separate_reduce_scatter_group", "_set_unshard_async_op"),
)
"""Methods that change only the time or the memory of a step in torch: the next unit is always gathered ahead, and sums
are always complete at the end of a backward."""
REFUSED = (
    *("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"),
    *("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"),
)


def _without_effect(self: object, *args: object, **kwargs: object) -> None:
    """Accept a hint."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(f"{name} is not supported by megatron_core.fully_shard; remove the call")

    return refuse


for _name in HINTS:
    setattr(FSDPModule, _name, _without_effect)
for _name in REFUSED:
    setattr(FSDPModule, _name, _refusal(_name))


class _Forward:
    """The two functions that torch's ``register_fsdp_forward_method`` calls."""

    def __init__(self, module: Any) -> None:
        self._units = _units_of(module)
        self._unit = self._units.unit_of(_choices_of(module))
        self._is_outermost = True

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._is_outermost = self._units.begin_method(self._unit)
        return _cast_inputs(_choices_of(module), args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = _cast_output(_choices_of(module), output)
        self._units.end_method(self._unit, output, is_outermost=self._is_outermost)
        return output


def _wrap(module: nn.Module, choices: ShardChoices) -> None:
    """Add the methods and hooks to ``module``."""
    for inner in module.modules():
        if inner is not module and isinstance(inner, FSDPModule):
            if "_row_units" in vars(inner):
                raise ConfigError(
                    f"fully_shard: {type(inner).__name__} inside of {type(module).__name__} has run already; call "
                    "fully_shard for all modules before the first forward"
                )
            vars(inner).setdefault("_outer", module)
    original = type(module)
    module.__class__ = type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": original.__module__})
    vars(module).update(_shard_choices=choices)
    module.register_forward_pre_hook(_first_forward, with_kwargs=True)
    policy = choices.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(lambda _, args, kwargs: _cast_inputs(choices, args, kwargs), with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(lambda _, args, output: _cast_output(choices, output))
    module.register_state_dict_pre_hook(lambda inner, *_: inner.reshard())
    module.register_load_state_dict_pre_hook(lambda inner, *_: inner.reshard())


def _cast_inputs(choices: ShardChoices, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = choices.policy.param_dtype
    if dtype is None or not choices.policy.cast_forward_inputs:
        return args, kwargs
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def _cast_output(choices: ShardChoices, output: Any) -> Any:
    dtype = choices.policy.output_dtype
    return output if dtype is None else cast_floating(output, dtype)


def _first_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Form the units before the first forward; their own hooks enter the later ones."""
    _refuse_compiling(module)
    if "_row_units" not in vars(_outermost(module)):
        _units_of(module).enter_first(module)


def _refuse_compiling(module: nn.Module, *_: Any) -> None:
    if torch.compiler.is_compiling():  # by a call of torch.compile after fully_shard
        torch._dynamo.disable(_refuse_graphs)(module)


def _choices_of(module: Any) -> ShardChoices:
    return vars(module)["_shard_choices"]


def _outermost(module: Any) -> nn.Module:
    """Return the outermost module of ``fully_shard`` around ``module``."""
    # vars, because an attribute of a module that is a module would become its child
    while "_outer" in vars(module):
        module = vars(module)["_outer"]
    return module


def _units_of(module: Any) -> RowUnits:
    """Return the units of the whole model; form them if nothing has run yet."""
    root = _outermost(module)
    if "_row_units" not in vars(root):
        order = list(dict.fromkeys(_choices_in_order(root)))
        units = RowUnits(root, [choices for choices in order if choices is not _choices_of(root)], _choices_of(root))
        for inner in root.modules():
            if isinstance(inner, FSDPModule):
                vars(inner)["_row_units"] = units
                inner.register_forward_pre_hook(_refuse_compiling, prepend=True)  # before the hooks of the units
    units = vars(root)["_row_units"]
    return units


def _choices_in_order(module: nn.Module) -> list[ShardChoices]:
    """Return the calls of ``fully_shard`` in ``module``, inner modules first: a parameter belongs to the innermost."""
    inside = [choices for child in module.children() for choices in _choices_in_order(child)]
    return [*inside, _choices_of(module)] if isinstance(module, FSDPModule) else inside
