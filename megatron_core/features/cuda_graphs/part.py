"""Notes of a run about its CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_core.features.cuda_graphs.settings import GraphConfig
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run


class GraphedLayers(RunPart):
    """The notes of a run with CUDA graphs."""

    def __init__(self, run: Run) -> None:
        self.config = run.config

    def notes(self) -> Iterator[str]:
        """See ``RunPart.notes``."""
        interval = self.config.optional("link_check_interval")
        parallel = self.config.parallel
        implementation = self.config.section(GraphConfig).cuda_graph_impl
        if interval is not None and parallel.tensor_model_parallel_size * parallel.context_parallel_size > 1:
            yield (
                f"link_check_interval={interval} does not check collectives inside CUDA graphs, with "
                f"cuda_graph_impl={implementation} those of layers; remove --cuda-graph-impl to check them"
            )
