"""How the work is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_core.config.pipeline_layout import parse_layout
from megatron_core.pipeline_parallel.schedules import SCHEDULES, TRAINING

PipelineSchedule = Literal[TRAINING]
"""The names in the table of schedules: to add one there is all it takes."""

BALANCED_STAGES: dict[str, bool | None] = {
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
}
"""The settings that say how layers are split over a pipeline, as they are when its stages are balanced by cost."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout: sizes of the parallel axes and what overlaps with what."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers (PP)."""
    context_parallel_size: int = 1
    """Ranks that share each sequence (CP); only 1 is supported so far."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts (EP); only 1 is supported so far."""
    pipeline_model_parallel_layout: str | None = None
    """What is on each stage, in order, as Et*3|(tt|)*29|L: E embedding, t layer, L output and loss, | next stage, *n
    repeats; stage i is on pipeline rank i mod PP. Default: the split whose most expensive stage is cheapest."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers on the first pipeline rank, over all its chunks; the other ranks share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers on the last pipeline rank, over all its chunks; the other ranks share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when layers are split over stages, not by its FLOPs (of which it has none)."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as one layer when layers are split over stages, not by their FLOPs."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers in each chunk of the interleaved schedule."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Chunks of layers on each pipeline rank, for the interleaved schedule (Narayanan et al. 2021,
    section 2.2)."""
    pipeline_schedule: PipelineSchedule | None = None
    """Order of forwards and backwards on the pipeline's ranks; default 1f1b, with chunks interleaved. zb_v and
    dualpipe_v hold two chunks on each rank, the second in reverse order. tools/show_schedule.py draws them."""
    pipeline_plan: str | None = None
    """Text file with a plan of one's own instead of --pipeline-schedule: a line of actions for each rank, as 0F0 0F1
    0B0 0B1 (docs/pipeline.md)."""
    overlap_p2p_communication: bool = True
    """Post receives before they are needed and wait for sends late; --no-overlap-p2p-communication waits for each
    send at once."""
    sequence_parallel: bool = False
    """Split the sequence over the TP ranks outside the matrix products (Korthikanti et al. 2022,
    section 4.2.2)."""
    tp_comm_overlap: bool = True
    """Reduce the input gradient of a parallel linear layer while its weight gradient is computed;
    --no-tp-comm-overlap does one after the other."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state and main weights over the data parallel ranks (ZeRO stage 1)."""
    overlap_grad_reduce: bool = False
    """Reduce gradient buckets over data parallel ranks while backward still runs."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward already runs; needs --use-distributed-optimizer."""
    ddp_bucket_size: int = 40_000_000
    """Elements in a gradient bucket."""
    rank_order: str = "tp-cp-ep-dp-pp"
    """Order of the axes over the ranks, the fastest first."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Back end of torch.distributed; auto: nccl with GPUs, else gloo."""
    distributed_timeout_minutes: float = 10.0
    """After how many minutes a collective that some rank does not join is an error."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model in a world of ``world_size`` ranks (DP)."""
        return world_size // self.model_parallel_size

    @property
    def accounted_layers(self) -> int:
        """How many of embedding and loss count as a layer."""
        return int(self.account_for_embedding_in_pipeline_split) + int(self.account_for_loss_in_pipeline_split)

    def num_chunks(self, num_layers: int) -> int:
        """Chunks of layers on each pipeline rank; 1 without interleaving."""
        if self.pipeline_model_parallel_layout is not None:
            return max(len(parse_layout(self.pipeline_model_parallel_layout)) // self.pipeline_model_parallel_size, 1)
        if self.num_layers_per_virtual_pipeline_stage is not None:
            per_rank = (num_layers + self.accounted_layers) // self.pipeline_model_parallel_size
            return max(per_rank // self.num_layers_per_virtual_pipeline_stage, 1)
        return self.num_virtual_stages_per_pipeline_rank or self.implied_chunks or 1

    @property
    def implied_chunks(self) -> int | None:
        """Chunks on each rank that the schedule prescribes; None if it leaves their number open."""
        return SCHEDULES[self.pipeline_schedule].chunks if self.pipeline_schedule is not None else None

    def schedule(self, num_layers: int) -> PipelineSchedule:
        """Name of the pipeline schedule after defaults."""
        return self.pipeline_schedule or ("interleaved" if self.num_chunks(num_layers) > 1 else "1f1b")
