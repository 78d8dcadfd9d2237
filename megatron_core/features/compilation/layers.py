"""torch.compile layer by layer: equal layers share a graph, and collectives between layers stay eager."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.features.compilation.graphs import compile_forward, keep_out_of_graphs
from megatron_core.features.compilation.settings import CompilationConfig
from megatron_core.tensor_parallel import ColumnParallelLinear
from megatron_core.transformer.block import TransformerBlock, TransformerLayer
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.core_attention import CoreAttention
from megatron_core.transformer.joined import separate_parts
from megatron_core.transformer.mlp import MLP

DIVIDED = "the layers run as several graphs with {parts} between them"


def compile_block(config: RunConfig, block: TransformerBlock, device: torch.device) -> str:
    """Compile the layers of a stage; see ``Feature.convert_layers``."""
    backend = config.section(CompilationConfig).compile_backend
    packs = config.data.reset_attention_mask
    divided = compile_layers(block.layers, backend=backend, packs_documents=packs)
    return f"compile=True: {divided}" if divided else ""


def compile_layers(
    layers: Iterable[TransformerLayer], *, backend: str = "inductor", packs_documents: bool = False
) -> str:
    """Compile the forward of ``layers``; call it before ``DataParallel``. Return the parts that stay eager, or "".

    A layer is one graph unless one of its parts depends on data of the host: the lengths of packed documents, the rows
    of each expert, or messages of context parallelism. Generation, whose numbers of tokens change, stays eager.
    """
    eager_parts: dict[str, None] = {}
    for layer in layers:
        separate_parts([layer])
        eager = dict(_eager_parts(layer, packs_documents=packs_documents))
        for module in eager.values():
            keep_out_of_graphs(module)
        eager_parts |= dict.fromkeys(eager)
        compile_forward(layer, fullgraph=not eager, backend=backend, eager_if=_generates)
    return DIVIDED.format(parts=", ".join(eager_parts)) if eager_parts else ""


def _generates(hidden: Tensor, context: SequenceContext) -> bool:
    return context.cache is not None


def _eager_parts(layer: TransformerLayer, *, packs_documents: bool) -> Iterable[tuple[str, nn.Module]]:
    """Yield the parts of a layer that cannot be in its graph, with a name of the kind of part."""
    attention = layer.self_attention
    if attention is None or isinstance(attention, ColumnParallelLinear):
        pass
    elif not getattr(attention, "fits_in_graph", False):
        yield "registered kinds of attention", attention
    elif type(attention.core_attention) is not CoreAttention:
        yield "attention over context-parallel ranks", attention.core_attention
    elif packs_documents:
        yield "attention of packed documents", attention.core_attention
    if layer.mlp is not None and not isinstance(layer.mlp, MLP | ColumnParallelLinear):
        yield "experts", layer.mlp
