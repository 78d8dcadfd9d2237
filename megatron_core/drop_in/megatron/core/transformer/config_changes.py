"""Assignments to a configuration after models were built from it."""

from typing import Any
from weakref import finalize, ref

from torch import nn

from megatron_core.config import ModelConfig
from megatron_core.config.rules_sharding import RECOMPUTABLE
from megatron_core.errors import ConfigError

_LIVE = frozenset(
    (
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_topk_scaling_factor",
        "moe_router_bias_update_rate",
        "moe_router_force_load_balancing",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_dtype",
        "moe_expert_capacity_factor",
        "moe_input_jitter_eps",
        "moe_token_drop_policy",
        "mtp_loss_scaling_factor",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
    )
)
"""Fields of ``ModelConfig`` that layers read in every forward."""
_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
_MODELS: dict[int, list[tuple["ref[nn.Module]", ModelConfig]]] = {}
"""The models built from a configuration and the settings that their layers read, by the id of the configuration.

They are not stored in the configuration because ``vars(config)`` must contain only its fields.
"""
_WHEN_BUILT = (
    *("sequence_parallel", "params_dtype", "tp_comm_overlap", "cp_comm_type", "kernel_backend"),
    *("is_hybrid_model", "moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"),
)


class ChangingConfig:
    """A configuration whose changes reach the models built from it, or raise ConfigError if they cannot.

    Fields that models do not read (callbacks, sizes of the layout) can always change. Deleted models do not count, and
    copies of a configuration have no models.
    """

    def add_model(self, root: nn.Module, model: ModelConfig) -> None:
        """Register a model ``root`` that was built with the settings ``model`` of this configuration."""
        if id(self) not in _MODELS:
            _MODELS[id(self)] = []
            finalize(self, _MODELS.pop, id(self))
        _MODELS[id(self)].append((ref(root), model))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field here and in the models.

        Raises ConfigError without any change if models were built with another value and cannot change.
        """
        known = _MODELS.get(id(self), [])
        known[:] = models = [(root, model) for root, model in known if root() is not None]
        if not models:
            return object.__setattr__(self, name, value)
        old = getattr(self, name, None)
        before = self._read()
        object.__setattr__(self, name, value)
        try:
            changes = _changes(before, self._read())
        except ConfigError as error:
            object.__setattr__(self, name, old)
            raise ConfigError(
                f"{name}={value!r} cannot be set: a model was built with {name}={old!r}, and {error}; set it before, "
                "or build another model from a copy of the configuration (dataclasses.replace)"
            ) from error
        for _, model in models:
            for field, new in changes.items():
                object.__setattr__(model, field, new)
        return None

    def _read(self) -> tuple[ModelConfig, dict[str, Any]]:
        """Return the settings with which models are built."""
        own: Any = self
        others = {name: getattr(own, name) for name in _WHEN_BUILT} | {"fp8": own.fp8_settings()}
        return own.model_config(without_pattern=True), others


def _changes(before: tuple[ModelConfig, dict[str, Any]], after: tuple[ModelConfig, dict[str, Any]]) -> dict[str, Any]:
    """Return the changed fields that layers read in every forward; ConfigError for other changes."""
    (old, fixed), (new, fixed_now) = before, after
    changes = {name: value for name, value in vars(new).items() if value != getattr(old, name)}
    wrong = [name for name, value in fixed.items() if value != fixed_now[name]]
    wrong += [name for name in changes if name not in _LIVE or (name in _LOSSES and not getattr(old, name))]
    if any(old.recomputes(part) != new.recomputes(part) for part in RECOMPUTABLE):
        wrong.append("recompute_modules")
    if wrong:
        raise ConfigError(f"its layers cannot change {', '.join(wrong)}")
    return changes
