"""Overlap of expert communication with the computation of another micro-batch, which is not supported."""

from megatron.core.unsupported import Unsupported


class TransformerModelChunkSchedulePlan(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = "overlap_moe_expert_parallel_comm needs no plan of your own; give --overlap-moe-expert-parallel-comm"
