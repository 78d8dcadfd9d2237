"""Megatron Core's names of a model's parameters: layers are numbered from 0 on each stage, and in layers of Transformer
Engine the parameters of a norm belong to the projection after it, and each expert has its own. Checkpoints have the
engine's names."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from torch import nn

from megatron.core.transformer.moe.expert_names import name_experts
from megatron_core.transformer.block import Layers
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.norm import Norm

_PROJECTIONS = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "q_layernorm": "linear_q_up_proj",
    "kv_layernorm": "linear_kv_up_proj",
}
"""The projection after each norm, in the module that has the norm."""
_PARTS = ("weight", "bias")
_LAYERS = "decoder.layers."


def named_experts(make: Any, pattern: str) -> Callable[..., nn.Module]:
    """Return the constructor ``make`` of a layer of experts, whose weights ``rename`` will name by expert."""

    def build(context: LayerContext, layer_number: int) -> nn.Module:
        layer = make(context, layer_number)
        layer.experts.awaited_pattern = pattern
        return cast(nn.Module, layer)

    return build


def norm_of_projection(context: LayerContext, size: int, **settings: Any) -> Norm:
    """Return a ``Norm`` whose parameters ``rename`` will move to the projection after it."""
    norm = Norm(context, size, **settings)
    norm.belongs_to_projection = True  # type: ignore[assignment]
    return norm


class FusedNorm(Norm):
    """A norm whose parameters are ``layer_norm_weight`` and ``layer_norm_bias`` of the projection after it."""

    # In a tuple: as an attribute, the projection would become a submodule of the norm.
    projection: tuple[Any]

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The factor on each channel, ``[size]``."""
        return self.projection[0].layer_norm_weight

    @property
    def bias(self) -> nn.Parameter | None:  # type: ignore[override]
        """The bias ``[size]``, or None."""
        return self.projection[0].layer_norm_bias


def rename(root: nn.Module) -> None:
    """Give the parameters in ``root`` Megatron Core's names; results do not change.

    ``load_state_dict`` also accepts the names of norms in layers without Transformer Engine.
    """
    for owner in [*root.modules()]:
        if isinstance(owner, Layers):
            layers = [*owner]
            owner._modules.clear()
            owner._modules.update({str(index): layer for index, layer in enumerate(layers)})
        if (pattern := vars(owner).pop("awaited_pattern", None)) is not None:
            name_experts(owner, pattern)
        for name, target in _PROJECTIONS.items():
            norm: Any = owner._modules.get(name)
            if getattr(norm, "belongs_to_projection", False) and not isinstance(norm, FusedNorm):
                _move(norm, owner.get_submodule(target))
                owner.register_load_state_dict_pre_hook(partial(_accept_names_of_norm, name, target))


def _move(norm: Any, projection: nn.Module) -> None:
    for part in _PARTS:
        projection.register_parameter(f"layer_norm_{part}", norm._parameters.pop(part, None))
    norm.__class__ = FusedNorm
    norm.projection = (projection,)


def _accept_names_of_norm(
    name: str, target: str, owner: nn.Module, state: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Rename a norm's entries of ``state`` to those of its projection."""
    for part in _PARTS:
        if (old := f"{prefix}{name}.{part}") in state:
            state[f"{prefix}{target}.layer_norm_{part}"] = state.pop(old)


def names_of_moved(root: nn.Module) -> Iterator[tuple[int, str]]:
    """The identity of each parameter of ``root`` that ``rename`` has moved, and its name in the norm."""
    for name, module in root.named_modules():
        if isinstance(module, FusedNorm):
            yield from ((id(getattr(module, part)), f"{name}.{part}") for part in _PARTS)


def with_global_number(name: str, numbers: Mapping[str, int]) -> str:
    """Replace the number of a layer in a name of ``state_dict``; ``numbers``: those of all layers, from 0, by name."""
    if not name.startswith(_LAYERS):
        return name
    index, _, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{numbers[index]}.{rest}"
