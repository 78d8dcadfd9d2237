"""The warmup of indexers, in which the rest of the model is frozen."""

from __future__ import annotations

from megatron_core.config import RunConfig
from megatron_core.features.sparse_attention.settings import INDEXER, SparseAttentionConfig
from megatron_core.models.gpt.model import GPTModel
from megatron_core.parallel import ParallelGroups


def freeze_but_indexers(config: RunConfig, model: GPTModel, groups: ParallelGroups, *, initialise: bool) -> None:
    """With ``dsa_indexer_warmup``, freeze a stage but its indexers; see ``Feature.change_stage``."""
    if config.model.section(SparseAttentionConfig).dsa_indexer_warmup:
        for name, parameter in model.named_global_parameters():
            parameter.requires_grad_(INDEXER in name)
