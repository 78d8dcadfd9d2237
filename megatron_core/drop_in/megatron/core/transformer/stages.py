"""Which layers a stage has, and initial weights of modules outside of a GPTModel."""

from fractions import Fraction

from torch import nn

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import parallel_state
from megatron_core.config import ModelConfig, ParallelConfig, RunConfig
from megatron_core.config.partition import Ends, layers_by_stage, partition
from megatron_core.errors import LayoutError
from megatron_core.parallel.initialization import draw_by_name


def stage_layers(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> range:
    """The global numbers, from 0, of the layers on chunk ``vp_stage`` of a pipeline rank, by default this one.

    As Megatron Core has it: the layout that is given, else the numbers of the first and the last rank, else as even as
    it goes, where embedding and loss may count as layers.
    """
    ranks, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    if pp_rank is None:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank() if ranks > 1 else 0
    if not 0 <= pp_rank < ranks or not 0 <= (vp_stage or 0) < chunks:
        raise LayoutError(f"pp_rank={pp_rank}, vp_stage={vp_stage} is outside of {ranks} ranks with {chunks} chunks")
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        first = layout.get_layer_offset(vp_stage=vp_stage or 0, pp_rank=pp_rank)
        return range(first, first + layout.get_num_layers_to_build(vp_stage=vp_stage or 0, pp_rank=pp_rank))
    return _all_stages(config, ranks * chunks)[(vp_stage or 0) * ranks + pp_rank]


def _all_stages(config: TransformerConfig, stages: int) -> list[range]:
    ends = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    if ends != (None, None):
        parallel = ParallelConfig(
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            decoder_first_pipeline_num_layers=ends[0],
            decoder_last_pipeline_num_layers=ends[1],
        )
        run = RunConfig(model=ModelConfig(num_layers=config.num_layers), parallel=parallel)
        found = layers_by_stage(run, 1, stages)
        if found[-1].stop != config.num_layers:
            raise LayoutError(f"the stages have {found[-1].stop} layers, but num_layers={config.num_layers}")
        return found
    costs = (config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split)
    if (config.num_layers + sum(costs)) % stages:
        raise LayoutError(
            f"num_layers={config.num_layers} cannot be divided by {stages} stages (ranks x chunks); give "
            "num_layers_in_first_pipeline_stage, or a pipeline_model_parallel_layout"
        )
    return partition(config.num_layers, stages, Ends(Fraction(costs[0]), Fraction(costs[1]), as_layers=True))


def draw_weights(module: nn.Module, seed: int, prefix: str) -> None:
    """Fill the parameters of this package's layers, as if they were part of a model under ``prefix``."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "init_method"):
            draw_by_name(prefix + name, parameter, seed)
