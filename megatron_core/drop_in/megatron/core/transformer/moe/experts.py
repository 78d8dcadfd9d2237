"""The experts of a layer with Megatron Core's arguments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.exported import ExportedModule, adopt
from megatron.core.transformer.layer_context import MLPSubmodules, SampleNumbers, check_submodules, layer_context
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.errors import LayoutError
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.moe import experts


class TEGroupedMLP(ExportedModule, experts.Experts):
    """This rank's experts, computed together: ``linear_fc1.weight`` is ``[experts, features, h]``.

    Its weights depend on ``name``, or on a number from torch's CPU generator, as those of ``MLP``.
    """

    stands_for = experts.Experts

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
