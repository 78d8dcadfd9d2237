"""Automatic pipeline stages of an unmodified model.

Every stage runs the model's own ``forward`` on its batch. Layers of other stages are replaced by modules that return
the received output; the forward of a stage ends where the first layer of the next stage would begin. Operations outside
of layers (masks, positions, rotary angles) are computed on every stage. Parameters outside of layers that belong to
another stage are replaced by NaN without memory, so that a value that should not be used would make the loss NaN.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megatron_core.any_model.context import ContextParallel
from megatron_core.any_model.context_attention import configs_of, decoder_parts, disable_cache
from megatron_core.any_model.data import model_arguments
from megatron_core.any_model.module import outermost
from megatron_core.any_model.partition import stage_ranges
from megatron_core.any_model.router_loss import refuse_kept_losses, refuse_router_loss_in_stages
from megatron_core.any_model.stages import ModelStage, ParameterPlace
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.texts import listed

HINT = "write the model as a megatron_core.PipelineModule (docs/pipeline_my_model.md)"


class _StageEnd(BaseException):
    """Ends the model's forward at the first layer of the next stage; no handler of ``Exception`` catches it."""


@dataclass
class _Passage:
    """State of one forward of a stage."""

    stage: int
    layers: range
    received: Any
    """Output of the stage before."""
    before: Any = None
    """Output of the last replaced layer, which the next layer must get."""
    output: Any = None
    """Output of the stage's last layer; None before it has run."""
    has_begun: bool = False
    """Whether the stage's first layer has run."""
    undefined: str = ""
    """First layer, or module after the layers, that reads a value of another stage which no message contains."""


class _Elsewhere(nn.Module):
    """Replaces a layer of another stage; it keeps the layer's plain attributes, which some models read."""

    def __init__(self, cut: "ModelCut", number: int, layer: nn.Module) -> None:
        super().__init__()
        plain = {n: v for n, v in vars(layer).items() if not n.startswith("_") and isinstance(v, int | float | str)}
        vars(self).update(plain)
        self._number = number
        self._pass_on = cut.pass_on

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the stage before, or end the stage."""
        return self._pass_on(self._number, args, kwargs)


def find_layers(model: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the list of the model's layers.

    It is the only ``nn.ModuleList`` or ``nn.Sequential`` whose entries have the classes that a transformers model names
    as indivisible (``_no_split_modules``), else the only outermost one with several entries that have parameters, else
    the one with most of the model's parameters. Lists in towers do not count. Errors: ``ConfigError`` if there is none,
    or several.
    """
    if isinstance(model, nn.Sequential):
        return "", model
    parts = decoder_parts(model)
    names = {module: name for name, module in model.named_modules() if module in parts}
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = [m for m in names if _is_list(m) and all(type(layer).__name__ in kinds for layer in m.children())]
    if not lists:
        lists = [layers for layers in outermost(model, _is_list) if layers in names]
        total = sum(p.numel() for p in model.parameters())
        most = [layers for layers in lists if 2 * sum(p.numel() for p in layers.parameters()) > total]
        lists = most if len(lists) > 1 and most else lists
    if len(lists) != 1:
        several = f"several lists of layers ({listed([names[layers] for layers in lists])})"
        problem = several if lists else "no list of layers"
        raise ConfigError(
            f"pipeline_model_parallel_size: {type(model).__name__} has {problem}, so its stages are not known; {HINT}"
        )
    return names[lists[0]], lists[0]


def _is_list(module: nn.Module) -> bool:
    entries = [child for child in module.children() if next(child.parameters(), None) is not None]
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(entries) > 1


class ModelCut:
    """A model of the caller on one pipeline rank, cut into stages in place.

    Outside of layers, parameters of modules that are registered before the list of layers belong to the first stage,
    those of later modules and of modules named in ``head_modules`` to the last, and those of modules around the list to
    all stages. Errors: ``ConfigError`` and ``LayoutError`` if the model cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank: Sequence[int],
        method: str | Sequence[int],
        head_modules: Sequence[str] = (),
        context: ContextParallel | None = None,
    ) -> None:
        self.model = model
        self.context = context
        self.stage_to_rank = stage_to_rank
        self.head_modules = tuple(head_modules)
        self._configs = configs_of(model)
        refuse_router_loss_in_stages(model, self._configs)
        disable_cache(model)
        self.path, self.container = find_layers(model)
        self.keys, self.layers = list(self.container._modules), [*filter(None, self.container._modules.values())]
        self.bounds = stage_ranges(
            method,
            [type(layer).__name__ for layer in self.layers],
            len(stage_to_rank),
            parameters=lambda: [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in self.layers],
        )
        self._passage: _Passage | None = None
        self.checks_values = False
        """Whether to look for values that a stage lacks, which costs a wait for the device."""
        self._users: dict[nn.Module, set[int]] = {}
        """Stages of each module outside of layers that has parameters of its own."""
        self.all_places = self._find_places()
        """Every parameter of the whole model."""
        self.places: dict[nn.Parameter, ParameterPlace] = {}

    def _find_places(self) -> dict[nn.Parameter, ParameterPlace]:
        final = len(self.stage_to_rank) - 1
        stages: dict[nn.Parameter, set[int]] = {}
        names: dict[nn.Parameter, str] = {}
        users: dict[nn.Module, set[int]] = {}
        prefix = f"{self.path}.".lstrip(".")
        after = False
        self._first_stage: dict[str, int] = {}
        """First stage of each module, by name."""
        for path, module in self.model.named_modules(remove_duplicate=False):
            after = after or module is self.container
            contains_layers = module is self.model or module is self.container or self.path.startswith(f"{path}.")
            key = path.removeprefix(prefix).partition(".")[0] if path.startswith(prefix) and path else ""
            if key in self.keys:  # inside of a layer
                number = self.keys.index(key)
                using = {next(s for s, layers in enumerate(self.bounds) if number in layers)}
            elif contains_layers:
                using = set(range(final + 1))
            else:
                is_head = after or any(path == name or path.startswith(f"{name}.") for name in self.head_modules)
                using = {final if is_head else 0}
            self._first_stage[path] = min(using)
            users.setdefault(module, set()).update(using)
            if key not in self.keys and module._parameters:
                self._users[module] = users[module]
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                stages.setdefault(parameter, set()).update(using)
                names.setdefault(parameter, name)
        return {p: ParameterPlace(names[p], tuple(sorted(numbers))) for p, numbers in stages.items()}

    def keep(self, index: int, dtype: torch.dtype, device: torch.device) -> None:
        """Drop the layers and parameters that the pipeline rank ``index`` does not hold; the run has these types."""
        self.mine = [stage for stage, rank in enumerate(self.stage_to_rank) if rank == index]
        self.places = {p: holder for p, holder in self.all_places.items() if set(holder.stages) & set(self.mine)}
        del self.all_places
        local = {number for stage in self.mine for number in self.bounds[stage]}
        self._elsewhere = [_Elsewhere(self, number, layer) for number, layer in enumerate(self.layers)]
        self.layers = [self.layers[n] if n in local else self._elsewhere[n] for n in range(len(self.layers))]
        self._parameters = [
            (module, name, parameter if parameter in self.places else None, _nothing(parameter.shape, dtype, device))
            for module in self._users
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._rest()
        for stage in self.mine:
            layers = self.bounds[stage]
            for number in layers:
                self.layers[number].register_forward_pre_hook(self._before_layer(stage, number), with_kwargs=True)
            self.layers[layers.stop - 1].register_forward_hook(self._keep_output(stage))
        for module, stages in self._users.items():
            module.register_forward_pre_hook(self._check_user(module, stages))

    def _rest(self) -> None:
        """Show all layers and parameters of this rank, as between two forwards."""
        self.container._modules.update(zip(self.keys, self.layers, strict=True))
        for module, name, parameter, _ in self._parameters:
            module._parameters[name] = parameter

    @contextmanager
    def _active(self, stage: int) -> Iterator[None]:
        """Show the layers and parameters of ``stage`` alone."""
        layers = [self.layers[n] if n in self.bounds[stage] else self._elsewhere[n] for n in range(len(self.layers))]
        self.container._modules.update(zip(self.keys, layers, strict=True))
        for module, name, parameter, nothing in self._parameters:
            module._parameters[name] = parameter if stage in self._users[module] else nothing
        try:
            yield
        finally:
            self._rest()

    def make_stages(self) -> tuple[dict[int, ModelStage], dict[int, list[list[nn.Module]]]]:
        """Return this rank's stages, and the modules of their units: each layer, and parts with weights of others."""
        stages: dict[int, ModelStage] = {}
        units: dict[int, list[list[nn.Module]]] = {}
        seen: set[nn.Parameter] = set()
        for stage in self.mine:
            named = [(holder.name, p) for p, holder in self.places.items() if stage in holder.stages and p not in seen]
            seen |= {p for _, p in named}
            layers = [self.layers[number] for number in self.bounds[stage]]
            outside = [
                module for module, users in self._users.items() if stage in users and not self._is_around(module)
            ]
            stages[stage] = ModelStage(partial(self.run, stage), [*outside, *layers], named)
            borrowed = stages[stage].borrowed({p for _, p in named})
            units[stage] = [[unit] for unit in layers] + [[unit] for unit in borrowed if unit not in layers]
        return stages, units

    def owns_buffer(self, name: str) -> bool:
        """Whether this rank is the first one whose stages use a buffer of the whole model."""
        return self._first_stage[name.rpartition(".")[0]] in self.mine

    def _is_around(self, module: nn.Module) -> bool:
        return any(inner is self.container for inner in module.modules())

    def run(self, stage: int, batch: Any, received: Any) -> Any:
        """Run the model's forward as ``stage``: return its last layer's output, or the model's on the last stage.

        ``batch`` has whole sequences; ``received`` and the output this rank's parts of them.
        """
        args, kwargs = model_arguments(self.model, batch)
        if self.context is None:
            return self.call(stage, args, kwargs, received)
        (args, kwargs), forward = self.context.split(args, kwargs)
        with forward:
            return self.call(stage, args, kwargs, received)

    def call(self, stage: int, args: Sequence[Any], kwargs: Mapping[str, Any], received: Any) -> Any:
        """``run`` with the arguments of the model's forward."""
        refuse_router_loss_in_stages(self.model, self._configs, kwargs.get("output_router_logits"))
        passage = _Passage(stage, self.bounds[stage], received)
        self._passage = passage
        with self._active(stage):
            try:
                output = self.model(*args, **kwargs)
                has_ended = stage == len(self.stage_to_rank) - 1 and passage.output is not None
            except _StageEnd:
                output = passage.output
                has_ended = True
            finally:
                self._passage = None
        if not has_ended or output is None:
            raise ConfigError(
                f"{self._name(self.bounds[stage].stop - 1)} does not run in each forward of "
                f"{type(self.model).__name__}, so the model cannot be cut after it; {HINT}"
            )
        if self.checks_values and stage < len(self.stage_to_rank) - 1:
            refuse_kept_losses([(self._name(n), self.layers[n]) for n in self.bounds[stage]], _tensors(output))
        if passage.undefined and _has_nan(output):
            raise ConfigError(
                f"{passage.undefined} of {type(self.model).__name__} reads values that only the first stage computes "
                "(features of images, states of an encoder, a sum over layers outside of them), besides the output of "
                f"the layer before it; put more layers into the first stage with partition_method=[...], or {HINT}"
            )
        return output

    def pass_on(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Replace the layer ``number``."""
        passage = self._passage
        if passage is None:
            raise LayoutError(f"{self._name(number)} is on another pipeline rank; call engine.train_batch(iterator)")
        if number >= passage.layers.stop:
            changed = None
            if passage.output is not None:
                changed = self._changed_output(number, passage.output, args, kwargs)
            if changed is not None:
                passage.output = changed
                self._note_undefined(passage, self._name(number), changed)
            raise _StageEnd
        is_last = number == passage.layers.start - 1
        passage.before = passage.received if is_last else _nothing_in(passage.received)
        return passage.before

    def _changed_output(
        self, number: int, before: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Return the input of a layer if code between the layers has changed the output ``before``, else None."""
        outputs = [*_tensors(before)]
        inputs = [*_tensors([args, dict(kwargs)])]
        if outputs and any(tensor is outputs[0] for tensor in inputs):
            return None
        # The stage before the cut runs such code, which may read values of that stage alone (features of images).
        if len(outputs) != 1 or not inputs or inputs[0].shape != outputs[0].shape:
            raise ConfigError(
                f"{type(self.model).__name__} changes the output of {self._name(number - 1)} before "
                f"{self._name(number)}, which a cut between them would lose: only the first argument of a layer may be "
                f"another tensor of the same shape; {HINT}"
            )
        return inputs[0]

    def _before_layer(self, stage: int, number: int) -> Callable[..., Any]:
        def give_received(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            passage = self._passage
            if passage is None or passage.stage != stage:
                return None
            passage.has_begun = True
            if stage == 0:
                return None
            if number == passage.layers.start:
                changed = self._changed_output(number, passage.before, args, kwargs)
                if changed is not None:  # by the code that the stage before has run
                    received = next(_tensors(passage.before))
                    args, kwargs = tree_map_only(Tensor, lambda x: received if x is changed else x, (args, kwargs))
                    if self.checks_values and changed.data_ptr() != received.data_ptr():
                        changed.data.fill_(torch.nan)  # a later reader, such as a sum over layers, is found by it
            self._note_undefined(passage, self._name(number), [args, kwargs])
            return args, kwargs

        return give_received

    def _note_undefined(self, passage: _Passage, name: str, inputs: Any) -> None:
        looks = self.checks_values and passage.stage > 0 and not passage.undefined
        if looks and _has_nan(inputs) and not _has_nan(passage.received):
            passage.undefined = name

    def _keep_output(self, stage: int) -> Callable[..., None]:
        def keep(_: nn.Module, args: Any, output: Any) -> None:
            if self._passage is not None and self._passage.stage == stage:
                self._passage.output = output

        return keep

    def _check_user(self, module: nn.Module, stages: set[int]) -> Callable[..., None]:
        """Check that a module outside of layers runs where its parameters are."""
        name = next(path for path, child in self.model.named_modules() if child is module)

        def check(_: nn.Module, args: Any) -> None:
            passage = self._passage
            if passage is not None and passage.has_begun and passage.stage in stages:
                self._note_undefined(passage, name, args)
            if passage is None or passage.stage in stages:
                return
            # Before its layers another stage than the first computes NaN, which it does not use.
            if passage.stage == 0 or passage.has_begun:
                where = "after" if passage.has_begun else "before"
                raise ConfigError(
                    f"{name} runs {where} the layers of {type(self.model).__name__}, but it is registered on the other "
                    f"side of {self.path or 'them'}; give head_modules= with the modules that run after the layers "
                    "alone; if it runs on both sides, " + HINT
                )

        return check

    def _name(self, number: int) -> str:
        return f"{self.path}.{self.keys[number]}".lstrip(".")


def _nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return NaN of this shape, without memory for its elements."""
    values = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
    nothing: Any = nn.Parameter(values, requires_grad=False)
    nothing.of_other_stage = True
    return nothing


def _nothing_in(value: Any) -> Any:
    """Replace the floating-point tensors in the output of a layer by NaN."""

    def nothing(tensor: Tensor) -> Tensor:
        return _nothing(tensor.shape, tensor.dtype, tensor.device).data if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, nothing, value)


def _has_nan(value: Any) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in _tensors(value) if tensor.is_floating_point())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)
