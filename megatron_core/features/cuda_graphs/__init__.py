"""CUDA graphs of layers: their kernels are launched by one call."""

from megatron_core.feature import Feature
from megatron_core.features.cuda_graphs.rules import graph_problems
from megatron_core.features.cuda_graphs.settings import GraphConfig, uses_graphs

CUDA_GRAPHS = Feature(
    name="cuda_graphs",
    settings=GraphConfig,
    is_used=uses_graphs,
    problems=graph_problems,
    convert_layers="megatron_core.features.cuda_graphs.graphs:convert_layers",
    run_part="megatron_core.features.cuda_graphs.part:GraphedLayers",
)
