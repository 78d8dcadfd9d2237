"""``PipelineModule``: a model as a list of layers, of which each pipeline rank constructs its own."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from megatron_core.any_model.activations import recompute_in_backward
from megatron_core.any_model.arguments import check_functions
from megatron_core.any_model.partition import check_partition_method, stage_ranges
from megatron_core.any_model.stages import ModelStage, ParameterPlace
from megatron_core.any_model.tensor_plan import Plan, check_plan_type, styles_of_plan
from megatron_core.errors import ConfigError

LossOfLabels = Callable[[Any, Any], Tensor]


class LayerSpec:
    """A layer that is constructed later, as ``typename(*module_args, **module_kwargs)``, where it is needed."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise ConfigError(f"LayerSpec: {typename!r} must be a class derived from torch.nn.Module")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self) -> nn.Module:
        """Construct the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer whose parameters all specs with the same ``key`` share, also on several stages.

    ``forward_fn(module, input)`` replaces the module's ``forward`` at this place. All specs of a key construct the same
    class with the same arguments.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key:
            raise ConfigError(f"TiedLayerSpec: key={key!r} must be a text without a dot; it becomes a part of names")
        if forward_fn is not None and not callable(forward_fn):
            raise ConfigError(f"TiedLayerSpec {key!r}: forward_fn={forward_fn!r} must be a function, or None")
        self.key = key
        self.forward_fn = forward_fn


class PipelineModule(nn.Module):
    """A model whose forward is ``for layer in layers: x = layer(x)``, for ``megatron_core.initialize``.

    ``layers``: modules, ``LayerSpec``s and functions. ``x`` begins as the first entry of a batch ``(inputs, labels)``;
    between layers it is a tensor, or tensors in tuples, lists and dicts. ``loss_fn(x, labels)`` returns the mean loss
    of a micro-batch; without it the last layer does. ``partition_method`` divides the layers over stages: ``uniform``,
    ``parameters`` (their number), ``type:REGEX`` (layers whose class matches), ``flops`` (forward FLOPs for
    ``example``, the inputs of a micro-batch), or the number of layers of each stage. With ``recompute_interval`` n,
    backward recomputes n layers at a time and only their inputs are kept (0: all activations are kept).
    ``tensor_plan``: styles of linear layers for tensor parallelism, by names as ``*.q_proj`` (``tensor_plan.STYLES``).

    A spec's weights are drawn with a generator seeded by (``seed``, number of the layer), so they do not depend on the
    layout. Parameters are named as in an ``nn.Sequential`` (``0.weight``), tied ones ``tied_modules.KEY.weight``. The
    model has no parameters before ``place``, which ``initialize`` calls.
    """

    runs_layers_apart = True
    """Stages call layers, not the model's forward."""

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        loss_fn: LossOfLabels | None = None,
        partition_method: str | Sequence[int] = "parameters",
        recompute_interval: int = 0,
        example: Any = None,
        tensor_plan: Plan | None = None,
        seed: int = 1234,
    ) -> None:
        super().__init__()
        if isinstance(layers, nn.Module | str | Mapping) or not isinstance(layers, Iterable):
            raise ConfigError(f"PipelineModule: layers={layers!r} must be a list of layers")
        self.specs = list(layers)
        self.loss_fn = loss_fn
        self.partition_method = partition_method
        self.recompute_interval = recompute_interval
        self.example = example
        self.tensor_plan = tensor_plan
        self.seed = seed
        if not self.specs or type(recompute_interval) is not int or recompute_interval < 0:
            raise ConfigError(
                f"PipelineModule: {len(self.specs)} layers, recompute_interval={recompute_interval}; legal: one layer "
                "or more, an integer >= 0"
            )
        self.class_names = list(map(_name_of, self.specs))
        """Class of each layer, or name of the function."""
        self._check_layers()
        if type(seed) is not int:
            raise ConfigError(f"PipelineModule: seed={seed!r} must be an integer")
        check_plan_type("tensor_plan", tensor_plan)
        check_functions(loss_fn=loss_fn)
        check_partition_method(partition_method, self.class_names, has_example=example is not None)
        self.bounds: list[range] = []
        self.places: dict[nn.Parameter, ParameterPlace] = {}
        self.uses: set[tuple[int, ...]] = set()
        """The stages that use a parameter, for every parameter of the whole model."""
        self._mine: list[int] = []
        self._calls: dict[int, Callable[[Any], Any]] = {}
        self._parts: dict[int, nn.Module] = {}
        """This rank's modules by the number of their layer."""

    def _check_layers(self) -> None:
        first: dict[str, TiedLayerSpec] = {}
        for spec in self.specs:
            if isinstance(spec, TiedLayerSpec) and repr(first.setdefault(spec.key, spec)) != repr(spec):
                raise ConfigError(
                    f"TiedLayerSpec {spec.key!r}: {first[spec.key]!r} and {spec!r} must construct the same module; use "
                    "forward_fn for a different use of its weights"
                )
            if isinstance(spec, type):
                raise ConfigError(
                    f"PipelineModule: layer {spec.__name__} is a class; write LayerSpec({spec.__name__}, ...) or "
                    "construct it"
                )
            if not (isinstance(spec, LayerSpec | nn.Module) or callable(spec)):
                raise ConfigError(f"PipelineModule: layer {spec!r} must be a module, a LayerSpec or a function")

    # Description of the whole model.

    @cached_property
    def skeleton(self) -> list[nn.Module | None]:
        """Each layer's module without memory for its weights, None for functions."""
        layers = [_without_memory(spec) if isinstance(spec, LayerSpec) else spec for spec in self.specs]
        return [layer if isinstance(layer, nn.Module) else None for layer in layers]

    def parameter_counts(self) -> list[int]:
        """Return the number of trained parameters of each layer."""
        return [
            0 if layer is None else sum(p.numel() for p in layer.parameters() if p.requires_grad)
            for layer in self.skeleton
        ]

    def flops(self) -> list[int]:
        """Return the FLOPs of each layer's forward for ``example``."""
        counts = []
        x = _on_meta(self.example)
        for layer, spec in zip(self.skeleton, self.specs, strict=True):
            call = spec if layer is None else _on_meta(layer)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                forward_fn = getattr(spec, "forward_fn", None)
                x = call(x) if forward_fn is None else forward_fn(call, x)
            counts.append(counter.get_total_flops())
        return counts

    def divide(self, stages: int) -> list[range]:
        """Return the layers of each of ``stages`` stages."""
        return stage_ranges(
            self.partition_method,
            self.class_names,
            stages,
            parameters=self.parameter_counts,
            flops=None if self.example is None else self.flops,
        )

    # Construction.

    def place(self, bounds: Sequence[range], mine: Sequence[int]) -> None:
        """Construct the layers of the stages ``mine`` of ``bounds``; the others are not constructed."""
        self.bounds = list(bounds)
        self._mine = list(mine)
        names = self._module_names()
        stages = dict[str, set[int]]()
        for stage, layers in enumerate(bounds):
            for number in layers:
                stages.setdefault(names[number], set()).add(stage)
        # This rank's modules, and those given to all ranks, whose parameters may be shared.
        modules: dict[str, nn.Module] = {}
        for number, (name, spec) in enumerate(zip(names, self.specs, strict=True)):
            if name in modules:
                continue
            if isinstance(spec, nn.Module):
                modules[name] = spec
            elif name and stages[name] & set(mine):
                modules[name] = self._build(spec, number)
        self._first_stage = {name: min(numbers) for name, numbers in stages.items()}
        users: dict[nn.Parameter, tuple[str, set[int]]] = {}
        for name, module in modules.items():
            for path, parameter in module.named_parameters(prefix=name):
                users.setdefault(parameter, (path, set()))[1].update(stages[name])
        self.places = {p: ParameterPlace(path, tuple(sorted(s))) for p, (path, s) in users.items() if s & set(mine)}
        used_on = [*stages.values(), *(numbers for _, numbers in users.values())]
        self.uses = {tuple(sorted(numbers)) for numbers in used_on}
        # The functions of this rank's layers; the specs of others are dropped.
        for name, module in modules.items():
            if stages[name] & set(mine):
                self._register(name, module)
        for number in (number for stage in mine for number in bounds[stage]):
            spec = self.specs[number]
            layer = modules.get(names[number])
            self._calls[number] = spec if layer is None else layer
            if layer is not None:
                self._parts[number] = layer
                if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
                    self._calls[number] = _Use(layer, spec.forward_fn)
        self.specs = [spec if number in self._calls else None for number, spec in enumerate(self.specs)]
        vars(self).pop("skeleton", None)

    def _module_names(self) -> list[str]:
        """Return the name of each layer's module, "" for functions; a module that occurs twice has one name."""
        first: dict[nn.Module, str] = {}
        names = []
        for number, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                names.append(f"tied_modules.{spec.key}")
            elif isinstance(spec, nn.Module):
                names.append(first.setdefault(spec, str(number)))
            else:
                names.append(str(number) if isinstance(spec, LayerSpec) else "")
        return names

    def _build(self, spec: LayerSpec, number: int) -> nn.Module:
        digest = hashlib.sha256(f"{self.seed} {number}".encode()).digest()
        with torch.random.fork_rng():
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            return spec.build()

    def _register(self, name: str, module: nn.Module) -> None:
        folder, _, label = name.rpartition(".")
        if folder and folder not in self._modules:
            self.add_module(folder, nn.ModuleDict())
        owner = self.get_submodule(folder)
        owner.add_module(label, module)

    # Stages.

    def plan_of_names(self, ranks: int) -> dict[str, str] | None:
        """Return the style of each split layer by its name, for tensor parallelism over ``ranks``.

        For one rank it is a plan to check, or None without ``tensor_plan``.
        """
        if ranks == 1 and self.tensor_plan is None:
            return None
        built = nn.Module()
        names = self._module_names()
        for name, layer in zip(names, self.skeleton, strict=True):
            if layer is not None and name not in built._modules:
                built._modules[name] = layer
        plan = styles_of_plan(built, self.tensor_plan, nn.Linear)
        return {name: style if count == 1 else f"packed_colwise:{count}" for name, (style, count) in plan.items()}

    def owns_buffer(self, name: str) -> bool:
        """Whether this rank is the first one whose stages use a buffer of the whole model."""
        return next(s for path, s in self._first_stage.items() if path and name.startswith(f"{path}.")) in self._mine

    def make_stages(self) -> tuple[dict[int, ModelStage], dict[int, list[list[nn.Module]]]]:
        """Return this rank's stages, and the modules of their units: each layer with parameters."""
        stages: dict[int, ModelStage] = {}
        units: dict[int, list[list[nn.Module]]] = {}
        seen: set[nn.Parameter] = set()
        for stage in self._mine:
            named = [(holder.name, p) for p, holder in self.places.items() if stage in holder.stages and p not in seen]
            seen |= {p for _, p in named}
            uses: dict[nn.Module, list[nn.Module]] = {}
            for number in self.bounds[stage]:
                if number in self._parts:
                    layer = self._parts[number]
                    call = self._calls[number]
                    uses.setdefault(layer, [layer]).extend([call] if isinstance(call, _Use) else [])
            modules_of_stage = [module for modules in uses.values() for module in modules]
            stages[stage] = ModelStage(partial(_run_stage, self, stage), modules_of_stage, named)
            units[stage] = [modules for layer, modules in uses.items() if next(layer.parameters(), None) is not None]
        return stages, units

    def layers_here(self) -> list[nn.Module]:
        """Return this rank's modules of layers, each once."""
        return list(dict.fromkeys(self._parts.values()))

    def run(self, stage: int, x: Any) -> Any:
        """Run the layers of ``stage``."""
        layers = self.bounds[stage]
        interval = self.recompute_interval if torch.is_grad_enabled() else 0
        if interval == 0:
            return self._run_layers(layers, x)
        for start in range(layers.start, layers.stop, interval):
            group = range(start, min(start + interval, layers.stop))
            modules = nn.ModuleList(self._parts[number] for number in group if number in self._parts)
            x = recompute_in_backward(modules, partial(self._run_layers, group))(x)
        return x

    def _run_layers(self, layers: range, x: Any) -> Any:
        for number in layers:
            x = self._calls[number](x)
        return x

    def forward(self, x: Any) -> Any:
        """Run all layers, if this rank has all of them."""
        for stage in range(len(self.bounds)):
            x = self.run(stage, x)
        return x


class _Use(nn.Module):
    """A use of a tied module by a function: calling it gathers the weights as calling the module does."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._forward_fn = forward_fn

    def forward(self, x: Any) -> Any:
        """Apply the function to the module and ``x``."""
        return self._forward_fn(self.module, x)


def _run_stage(model: PipelineModule, stage: int, batch: Any, received: Any) -> Any:
    inputs = batch[0] if isinstance(batch, tuple | list) else batch  # a batch without labels is the inputs
    return model.run(stage, inputs if stage == 0 else received)


def _name_of(spec: Any) -> str:
    if isinstance(spec, LayerSpec | nn.Module):
        return (spec.typename if isinstance(spec, LayerSpec) else type(spec)).__name__
    return getattr(spec, "__name__", "")


def _without_memory(spec: LayerSpec) -> nn.Module:
    try:
        with torch.device("meta"):
            return spec.build()
    except (RuntimeError, NotImplementedError):  # the constructor reads values of tensors
        with torch.random.fork_rng():
            return spec.build().to("meta")


def _on_meta(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to("meta")
    content = dict(value) if isinstance(value, Mapping) else value
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), content)
