"""Experts that compute every token, with Megatron Core's arguments."""

from typing import Any

from torch import Tensor

from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import MLPSubmodules, check_submodules, layer_context
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.errors import ConfigError
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.moe import layer


class SharedExpertMLP(ExportedModule, layer.SharedExperts):
    """The shared experts of ``moe_shared_expert_intermediate_size`` features alone.

    ``gate`` must be ``config.moe_shared_expert_gate``. ``name`` determines the weights.
    """

    stands_for = layer.SharedExperts

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        gate: bool = False,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        if gate != config.moe_shared_expert_gate or not config.moe_shared_expert_intermediate_size:
            raise ConfigError(
                f"SharedExpertMLP: gate={gate} with moe_shared_expert_gate={config.moe_shared_expert_gate} and "
                f"moe_shared_expert_intermediate_size={config.moe_shared_expert_intermediate_size}; set both in the "
                "configuration"
            )
        model = config.model_config()
        check_submodules(model, submodules)
        context = layer_context(config, model, pg_collection)
        layer.SharedExperts.__init__(self, context, 0)
        adopt(self, (), config, context, f"{name or 'shared_experts'}.")

    def forward(self, hidden_states: Tensor, context: Any = None) -> Tensor:  # type: ignore[override]
        """``[s, b, h]`` -> the same shape."""
        if not isinstance(context, SequenceContext):
            refuse("SharedExpertMLP.forward", locals())
            context = SequenceContext()
        return super().forward(hidden_states, context)


class FusedSharedExpertMLP(SharedExpertMLP):
    """``SharedExpertMLP``."""
