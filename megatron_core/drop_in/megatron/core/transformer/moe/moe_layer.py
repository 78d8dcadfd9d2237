"""Experts, shared experts and layers of experts with Megatron Core's arguments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import (
    MLPSubmodules,
    MoESubmodules,
    SampleNumbers,
    check_submodules,
    layer_context,
)
from megatron.core.transformer.layer_parts import PARTS
from megatron.core.transformer.moe.expert_names import GROUPED, SEQUENTIAL, name_experts, pattern_of
from megatron.core.transformer.spec_utils import get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.experts import experts, layer
from megatron_core.features.mxfp8_messages.messages import narrow_messages
from megatron_core.transformer.context import LayerContext, SequenceContext


class TEGroupedMLP(ExportedModule, experts.Experts):
    """This rank's experts, computed together: ``linear_fc1.weight`` is ``[experts, features, h]``.

    Its weights depend on ``name``, or on a number from torch's CPU generator, as those of ``MLP``.
    """

    stands_for = experts.Experts
    names_of_experts = GROUPED
    """Pattern of the names of weights, also of a layer with this class in its specification."""

    num_local_experts: int

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        model = config.model_config()
        check_submodules(model, submodules)
        context = layer_context(config, model, pg_collection)
        experts.Experts.__init__(self, context)
        if num_local_experts != len(self.linear_fc1.weight):
            raise LayoutError(
                f"num_local_experts={num_local_experts}, but num_moe_experts={config.num_moe_experts} with "
                f"expert_model_parallel_size={config.expert_model_parallel_size} are {len(self.linear_fc1.weight)} on "
                "each rank"
            )
        adopt(self, (), config, context, f"{name or f'experts.{int(torch.randint(2**62, ()))}'}.")
        name_experts(self, self.names_of_experts)

    def bind(self, config: TransformerConfig, context: LayerContext, samples: SampleNumbers) -> None:
        """Bind the experts and count them."""
        super().bind(config, context, samples)
        self.num_local_experts = len(self.linear_fc1.weight)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Any, permuted_probs: Any, *others: Any
    ) -> Any:
        """Rows ``[R, h]`` sorted by expert, the number of rows of each expert and probabilities ``[R]`` -> (``[R, h]``,
        None). The probabilities are factors of the rows."""
        if isinstance(permuted_probs, Sequence):  # a layer calls with rows, probabilities, counts
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs, *others)
        counts = torch.as_tensor(tokens_per_expert).tolist()
        return super().forward(permuted_local_hidden_states, permuted_probs, counts), None


GroupedMLP = TEGroupedMLP
GroupedMLPSubmodules = MLPSubmodules


class SequentialMLP(TEGroupedMLP):
    """``TEGroupedMLP``: the experts are always computed together. A built model has instances of that class."""

    names_of_experts = SEQUENTIAL


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


MOE_PARTS = (TEGroupedMLP, SharedExpertMLP)
"""The classes of the parts of a layer of experts."""


class MoELayer(ExportedModule, layer.MoELayer):
    """A layer of experts alone; ``layer_number`` counts from 1 and is a part of the weights' names.

    Balancing losses take part in the backward pass, as means over each micro-batch; ``finalize_model_grads`` updates
    the expert biases.
    """

    stands_for = layer.MoELayer

    layer_number: int

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        context, number = layer_context(config, config.model_config(), pg_collection), (layer_number or 1) - 1
        layer.MoELayer.__init__(self, context, number)
        kind = get_module(None if submodules is None else submodules.experts)
        built: Any = self.experts
        built.awaited_pattern = pattern_of(kind, grouped_gemm=config.moe_grouped_gemm)
        adopt(self, (*PARTS, *MOE_PARTS), config, context, f"decoder.layers.{number}.mlp.")

    def bind(self, config: TransformerConfig, context: LayerContext, samples: SampleNumbers) -> None:
        """Bind the layer, number it from 1, and select the format of its messages."""
        super().bind(config, context, samples)
        formats = config.moe_dispatch_fwd_dtype, config.moe_combine_bwd_dtype
        narrow_messages(self, *formats, context.config.kernel_backend)
        self.set_layer_number(self.router.layer_number + 1)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, from 1, also in its router; weights do not change."""
        self.layer_number, self.router.layer_number = layer_number, layer_number - 1
        self.expert_layers = [self.router.layer_number]

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """``[s, b, h]`` -> (the same shape, None: there is no bias to add). ``padding_mask`` ``[b, s]`` is True for
        padding, which does not count in losses and loads."""
        if isinstance(intermediate_tensors, SequenceContext):
            return super().forward(hidden_states, intermediate_tensors)
        refuse("MoELayer.forward", locals())
        passed = self.sequence(hidden_states, padding_mask=padding_mask)
        passed = self.with_losses(layer.moe_loss_names(self.context.config), hidden_states, passed)
        return super().forward(hidden_states, passed)


BaseMoELayer = MoELayer
