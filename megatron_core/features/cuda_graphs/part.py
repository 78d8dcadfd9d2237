"""Captures the CUDA graphs of a run between its steps, and its notes about them."""

from collections.abc import Iterator

from megatron_core.features.cuda_graphs.graphs import GraphedFunction, capture_stages
from megatron_core.features.cuda_graphs.settings import GraphConfig
from megatron_core.training.driver import StepOutcome
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run


class GraphedLayers(RunPart):
    """The graphs of a run."""

    def __init__(self, run: Run) -> None:
        self.config = run.config
        attributes = [
            value for stage in run.stages.values() for module in stage.modules() for value in vars(module).values()
        ]
        functions = [value for value in attributes if isinstance(value, GraphedFunction)]
        self._stages = list(dict.fromkeys(function.stage for function in functions))

    def after_step(self, outcome: StepOutcome) -> None:
        """See ``RunPart.after_step``."""
        capture_stages(self._stages)

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
