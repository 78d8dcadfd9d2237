"""Core attention over the ranks that share the document of a micro-batch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.models import GPTModel
from megatron_core.parallel.groups import ALONE, ContextGroups, Group, ParallelGroups
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import core_attention_of


class DynamicAttention(nn.Module):
    """The core attention of a layer for each number of ranks, without weights."""

    def __init__(self, usual: nn.Module, by_ranks: Mapping[int, nn.Module]) -> None:
        """``usual``: the attention of sequences over the ranks of context parallelism."""
        super().__init__()
        self.usual = usual
        self.by_ranks = nn.ModuleDict({str(ranks): attention for ranks, attention in by_ranks.items()})

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, *sinks: Tensor) -> Tensor:
        """As ``CoreAttention``, over ``context.sharing_ranks`` ranks."""
        ranks = context.sharing_ranks
        attention = self.usual if ranks is None else self.by_ranks[str(ranks)]
        return attention(query, key, value, context, *sinks)


def replace_attention(config: RunConfig, model: GPTModel, groups: ParallelGroups, *, initialise: bool) -> None:
    """Replace the core attention of all layers; a collective call, which creates the groups."""
    total = groups.group("dp-cp").size()
    sizes = [1 << power for power in range(total.bit_length())]
    nested: dict[int, Group] = {1: ALONE, **groups.make_neighbour_groups("dp-cp", sizes[1:])}
    plain = LayerContext(config.model, model.parallel, model.tp_group, config.training.seed, groups)
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "core_attention")]
    for layer in layers:
        number = layer.layer_number
        window = config.model.window_of_layer(number)
        context = plain.of_layer(number)
        layer.core_attention = DynamicAttention(
            layer.core_attention,
            {
                size: core_attention_of(replace(context, cp=ContextGroups(group)), number, window_size=window)
                for size, group in nested.items()
            },
        )
