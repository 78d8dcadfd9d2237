"""Prepare any ``nn.Module`` for data parallelism: settings, dtype, equal weights on all ranks, units of ZeRO.

``meta_init`` constructs a model without memory for its parameters."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from megatron_core.config import ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_core.config.file import read_config
from megatron_core.config.run import field_types, names_in_any_model
from megatron_core.config.validate import check, without_data
from megatron_core.config.values import convert, describe_type, perhaps
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.context_parallelism.settings import ContextParallelConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.fp8.settings import FP8Config, Recipe
from megatron_core.parallel.compiled import DerivedForward
from megatron_core.parallel.texts import gather_from_all_ranks, listed
from megatron_core.text_file import read_table

_TABLE = read_table(__file__)
READ = {*(setting.name for setting in fields(OptimizerConfig)), *_TABLE["read"]}.difference(_TABLE["not_read"])
"""Settings of a run that apply to a model of the caller; all others describe the GPT of ``pretrain_gpt.py``."""
LOCAL = ("_dir", "_file", "_uri")
"""Ends of the names of settings that may differ between ranks."""
FIRST_MODULES = 8
"""Number of names that an error message lists."""

Initialise = Callable[[nn.Module], None]
UnitClasses = Sequence[str | type[nn.Module]]


def read_engine_settings(config: Mapping[str, Any] | str | os.PathLike[str] | RunConfig | None) -> RunConfig:
    """Convert the ``config`` of ``initialize`` into a ``RunConfig``; check it for ``world_size`` ranks later.

    Errors: ``ConfigError`` for unknown names, values of the wrong type, and settings of the GPT model or its data.
    """
    if isinstance(config, RunConfig):
        settings = config
        _check_types(settings)
    elif isinstance(config, str | os.PathLike):
        settings = read_config(str(config), RunConfig())
    elif isinstance(config, Mapping) or config is None:
        settings = _from_mapping(config or {})
    else:
        raise ConfigError(f"config={config!r} must be a dict, the path of a YAML or JSON file, or a RunConfig")
    values = settings.flat()
    defaults = RunConfig().flat()
    if settings.section(FP8Config).fp8_param_gather:
        raise ConfigError(
            "fp8_param_gather=True on a model of your own: gathered weights would be rounded to FP8 for all their "
            "readers (code outside of the FP8 products, engine.gathered, full_state_dict); remove it"
        )
    legal = READ | names_in_any_model()
    foreign = [name for name in values if values[name] != defaults[name] and name not in legal]
    if foreign:
        raise ConfigError(
            f"{listed(foreign)} {'has' if len(foreign) == 1 else 'have'} no effect on a model of your own (settings of "
            "the GPT model, its layout or its data); remove them from config"
        )
    return settings


def _check_types(settings: RunConfig) -> None:
    """ConfigError for values of a ``RunConfig`` that a configuration file could not have."""
    kinds = field_types()
    faults = []
    defaults = RunConfig().flat()
    for name, value in settings.flat().items():
        try:
            fits = value == defaults[name] or (convert(value, kinds[name]) == value and not isinstance(value, list))
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            faults.append(f"{name}={value!r} does not fit; legal: {describe_type(kinds[name])}")
    if faults:
        raise ConfigError(f"config: {'; '.join(faults)}")


def _from_mapping(config: Mapping[str, Any]) -> RunConfig:
    kinds = field_types()
    faults = []
    values = RunConfig().flat()
    for name, value in config.items():
        if name not in kinds:
            hint = perhaps(
                str(name), READ, otherwise="docs/any_model.md has examples, docs/megatron_flags.md all names"
            )
            faults.append(f"{name!r} is not a setting; {hint}")
            continue
        try:
            values[name] = convert(value, kinds[name])
        except (TypeError, ValueError, OverflowError):
            faults.append(f"{name}={value!r} does not fit; legal: {describe_type(kinds[name])}")
    if faults:
        raise ConfigError(f"config: {'; '.join(faults)}")
    return RunConfig.from_flat(values)


def check_engine_settings(config: RunConfig, world_size: int) -> RunConfig:
    """Check ``config`` on ``world_size`` ranks; return it with a constant learning rate if the steps are unknown."""
    training = config.training
    optimizer = config.optimizer
    if (
        training.train_iters is None
        and training.train_samples is None
        and not (optimizer.lr_decay_iters or optimizer.lr_decay_samples)
    ):
        optimizer = replace(optimizer, lr_decay_style="constant")
    gpt = replace(
        config,
        optimizer=optimizer,
        training=_without_blocks(training),
        # Its heads and tokens are divided elsewhere.
        model=_model_of(config.parallel),
        parallel=_without_heads(config.parallel),
        data=replace(config.data, mock_data=True, vocab_size=64, seq_length=config.parallel.sequence_unit[0]),
        checkpoint=replace(config.checkpoint, save="checkpoints"),
    )
    check(without_data(gpt), world_size)  # settings of the GPT model have their defaults
    return replace(config, optimizer=optimizer)


def check_same_settings(config: RunConfig, device: torch.device) -> None:
    """Compare all settings, except names of files and folders, between the ranks.

    Errors: ``LayoutError`` on all ranks with the first difference.
    """
    values = {name: value for name, value in config.flat().items() if not name.endswith(LOCAL)}
    by_rank = gather_from_all_ranks(json.dumps(values, default=str), device)
    other = next((rank for rank, text in enumerate(by_rank) if text != by_rank[0]), None)
    if other is not None:
        first = json.loads(by_rank[0])
        second = json.loads(by_rank[other])
        name = next(name for name in values if first[name] != second[name])
        raise LayoutError(
            f"the settings differ between ranks: rank 0 has {name}={first[name]!r}, and rank {other} has "
            f"{second[name]!r}; give the same config and optimizer on every rank"
        )


def _without_blocks(training: TrainingConfig) -> TrainingConfig:
    """Replace an FP8 recipe with blocks, whose rules are about extents of the GPT, by one with the same conditions."""
    same: dict[Recipe, Recipe] = {"blockwise": "tensorwise", "mxfp8": "rowwise"}
    settings = training.section(FP8Config)
    return replace(settings, fp8_recipe=same.get(settings.fp8_recipe, settings.fp8_recipe))


def _without_heads(parallel: ParallelConfig) -> ParallelConfig:
    """Return the settings with a kind of communication without rules about the heads of the GPT.

    Errors: ``ConfigError`` for several kinds, because the layers of the caller's model have no numbers.
    """
    split = parallel.section(ContextParallelConfig)
    kinds = split.cp_comm_type
    if len(kinds) > 1:
        raise ConfigError(f"cp_comm_type={' '.join(kinds)} on a model of your own must be one kind for all layers")
    return replace(split, cp_comm_type=("p2p",)) if kinds == ("a2a",) else split


def _layers_of(parallel: ParallelConfig) -> int:
    """Return a number of layers that the pipeline's settings accept: one for each stage, and the default without it."""
    stages = parallel.pipeline_model_parallel_size * parallel.num_chunks(0)
    return stages if parallel.pipeline_model_parallel_size > 1 else RunConfig().model.num_layers


def _model_of(parallel: ParallelConfig) -> ModelConfig:
    """Return a GPT that the settings of the layout accept: the caller's model is cut and split elsewhere."""
    ranks = parallel.expert_model_parallel_size
    experts = 2 * ranks if ranks > 1 else None
    return replace(RunConfig().model.section(MoEConfig), num_layers=_layers_of(parallel), num_experts=experts)


def cast_module(module: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Move ``module`` to ``device`` and its floating-point parameters to the compute dtype.

    Buffers keep their dtype with bf16 and fp16, because running statistics and tables lose accuracy; with fp64 they
    become float64. Batch norm, whose parameters and running statistics must have one dtype, computes with float32
    copies of its 16-bit parameters. Parameters and buffers on the meta device stay there.
    """
    dtype = getattr(torch, config.training.compute_dtype)

    def moved(tensor: Tensor, to: torch.dtype | None) -> Tensor:
        wanted = to if tensor.is_floating_point() else None
        tensor = tensor.to(device=None if tensor.is_meta else device, dtype=wanted)
        # Checkpoints read and fill flat views.
        is_scattered = tensor.layout == torch.strided and not tensor.is_contiguous()
        return tensor.contiguous() if is_scattered else tensor

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data = moved(parameter.data, dtype)
            parameter.grad = None  # of a backward before, to which autograd would add
        for inner in module.modules():
            for name, buffer in inner.named_buffers(recurse=False):
                inner._buffers[name] = moved(buffer, dtype if dtype == torch.float64 else None)
            if isinstance(inner, _NormBase) and inner.running_mean is not None and dtype.itemsize == 2:
                inner.forward = DerivedForward(inner.forward, _with_float32_parameters)


def _with_float32_parameters(method: Any) -> Callable[..., Any]:
    module: nn.Module = method.__self__

    def forward(*args: Any, **kwargs: Any) -> Any:
        wide: Any = copy(module)  # with the same buffers, which change in place
        wide._parameters = {name: None if p is None else p.float() for name, p in module._parameters.items()}
        return method.__func__(wide, *args, **kwargs)

    return forward


def check_same_module(module: nn.Module, device: torch.device) -> None:
    """Compare names, shapes, dtypes and trainability of all parameters and buffers between the ranks.

    Errors: ``LayoutError`` on all ranks with the first difference.
    """
    lines = [
        f"{n} {tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for n, p in module.named_parameters()
    ]
    lines += [f"{n} {tuple(b.shape)} {b.dtype} buffer" for n, b in module.named_buffers()]
    if not lines:
        raise ConfigError(f"model={type(module).__name__} has no parameters; there is nothing to train")
    digests = gather_from_all_ranks(hashlib.sha256("\n".join(lines).encode()).hexdigest(), device)
    if len(set(digests)) > 1:
        texts = [text.splitlines() for text in gather_from_all_ranks("\n".join(lines), device)]
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        pairs = zip([*texts[0], "nothing"], [*texts[other], "nothing"], strict=False)
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise LayoutError(
            f"the model differs between ranks: rank 0 has {first}, and rank {other} has {second}; construct the same "
            "model on every rank"
        )


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor]) -> None:
    """Replace ``tensors`` by those of rank 0; ranks may have drawn different initial weights."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in tensors:
            if not tensor.is_meta:
                contiguous = tensor.contiguous()
                dist.broadcast(contiguous.view(torch.uint8) if contiguous.dtype == torch.bool else contiguous, 0)
                tensor.copy_(contiguous)


def find_units(module: nn.Module, classes: UnitClasses | None = None) -> list[list[nn.Module]]:
    """Choose the modules that ZeRO stages 2 and 3 gather and free as a whole, in the order of registration.

    ``classes``: names or types; the outermost modules of these classes are units. With the class of ``module`` itself
    there are no units, and all parameters stay in memory during a forward and a backward. By default the classes that a
    transformers model names as indivisible (``_no_split_modules``), else the entries of the outermost
    ``nn.ModuleList`` and ``nn.Sequential`` with several entries, else the children without lists of parameters.
    Parameters outside of all units stay in memory during a forward and a backward (Zhao et al. 2023, section 4.2).
    """
    if classes is not None:
        if _is_of(module, classes):
            return []
        units = outermost(module, lambda unit: _is_of(unit, classes))
        if not units:
            names = list(dict.fromkeys(type(unit).__name__ for unit in module.modules()))
            raise ConfigError(
                f"unit_classes={[getattr(c, '__name__', c) for c in classes]}: the model has no such modules; its "
                f"classes are {listed(names, FIRST_MODULES)}"
            )
        return [[unit] for unit in units]
    named = list(getattr(module, "_no_split_modules", None) or ())
    units = outermost(module, lambda unit: _is_of(unit, named)) if named else []
    if not units:
        lists = outermost(module, lambda unit: isinstance(unit, nn.ModuleList | nn.Sequential) and len(unit) > 1)
        units = [member for unit in lists for member in unit.children()]
    # No hook sees the use of a list of parameters, which has no forward.
    units = units or [c for c in module.children() if not isinstance(c, nn.ParameterList | nn.ParameterDict)]
    units = [unit for unit in units if next(unit.parameters(), None) is not None]
    unique = list(dict.fromkeys(units))
    return [[unit] for unit in unique]


def outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Return the modules inside ``module`` for which ``wanted`` is true and which are inside no other of them."""
    chosen: list[nn.Module] = []
    for child in module.children():
        chosen += [child] if wanted(child) else outermost(child, wanted)
    return chosen


def _is_of(module: nn.Module, classes: UnitClasses) -> bool:
    return any(type(module).__name__ == c if isinstance(c, str) else isinstance(module, c) for c in classes)


class LocalInitialisation:
    """Initialises parameters on the meta device where they are needed, equal on all ranks.

    The module that owns a parameter is copied without its children, gets memory, and is initialised by
    ``initialise(module)`` (default: its ``reset_parameters()``, or ``_init_weights(module)`` of a transformers model)
    with a generator seeded by (``seed``, name of the module). So the result depends neither on ranks nor on units.
    """

    def __init__(self, module: nn.Module, seed: int, device: torch.device, initialise: Initialise | None) -> None:
        self.seed = seed
        self.device = device
        self.initialise = initialise or getattr(module, "_init_weights", None)
        self.owners = {
            f"{path}.{label}".lstrip("."): (path, owner, dict(owner._parameters))
            for path, owner in module.named_modules()
            for label, parameter in owner.named_parameters(recurse=False)
            if parameter.is_meta
        }
        missing = [name for name, buffer in module.named_buffers() if buffer.is_meta]
        if missing:
            raise ConfigError(
                f"model: {listed(missing)} {'is a buffer' if len(missing) == 1 else 'are buffers'} on the meta device, "
                "whose values cannot be computed again; construct the model in megatron_core.meta_init()"
            )

    def __call__(self, name: str, parameter: nn.Parameter) -> None:
        """Fill ``parameter``, which has memory."""
        path, owner, parameters = self.owners[name]
        scratch = copy(owner)
        scratch._modules = {}
        scratch._parameters = {
            label: None
            if other is None
            else nn.Parameter(torch.empty(other.shape, dtype=other.dtype, device=parameter.device), other.requires_grad)
            for label, other in parameters.items()
        }
        digest = hashlib.sha256(f"{self.seed} {path}".encode()).digest()
        devices = [parameter.device] if parameter.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            self._initialise(scratch, path)
            parameter.copy_(getattr(scratch, name.rpartition(".")[2]))

    def _initialise(self, scratch: nn.Module, path: str) -> None:
        if self.initialise is not None:
            self.initialise(scratch)
        elif callable(reset := getattr(scratch, "reset_parameters", None)):
            reset()
        else:
            raise ConfigError(
                f"{path or 'the model'} ({type(scratch).__name__}) is on the meta device without reset_parameters(); "
                "give initialise=, a function that fills the parameters of one module"
            )


@contextmanager
def meta_init() -> Iterator[None]:
    """Return a context in which parameters of modules are on the meta device, and buffers have their values.

    ``initialize`` gives the parameters memory and initial values, unit by unit. Each parameter has memory until it is
    registered in its module. In ``torch.device("meta")`` buffers, too, would lose their values, which cannot be
    computed again.
    """
    moved = WeakIdKeyDictionary()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        if parameter not in moved:  # one that is registered twice stays one
            moved[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            vars(moved[parameter]).update(vars(parameter))
        return moved[parameter]

    hook: Any = move  # torch's type says that hooks return nothing
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
