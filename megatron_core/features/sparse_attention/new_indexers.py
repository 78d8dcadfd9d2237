"""Indexers for a model that was trained without sparse attention, and their warmup, in which the rest is frozen."""

from collections.abc import Mapping
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.sparse_attention.settings import INDEXER, SparseAttentionConfig
from megatron_core.models.gpt.model import GPTModel
from megatron_core.parallel import ParallelGroups
from megatron_core.training.parts import AddedWeights

VARIANT = "experimental_attention_variant"


class NewIndexers(AddedWeights):
    """The indexers of all layers."""

    title = "indexers"

    def contain(self, name: str) -> bool:
        """Whether a parameter, or a piece of a checkpoint, belongs to an indexer."""
        return INDEXER in name

    def are_missing(self, stored: Mapping[str, Any]) -> bool:
        """Whether the model with the settings ``stored`` has full attention in all layers."""
        return stored.get(VARIANT, "dsa") is None

    def compared(self, stored: Mapping[str, Any], *, only_weights: bool) -> Mapping[str, Any]:
        """The settings without those of indexers.

        Errors: ``CheckpointError`` if the run resumes the training, or would not train the indexers.
        """
        if not only_weights:
            raise CheckpointError(
                f"{VARIANT}=dsa, but the checkpoint has no indexers; to start with its weights and new indexers, add "
                "--finetune; to resume its training, remove --experimental-attention-variant"
            )
        model = self.config.model.section(SparseAttentionConfig)
        if not model.trains_indexers:
            raise CheckpointError(
                f"dsa_indexer_loss_coeff={model.dsa_indexer_loss_coeff}, but the checkpoint has no "
                "indexers, so new ones would choose keys at random; train them with --dsa-indexer-loss-coeff, first "
                "with --dsa-indexer-warmup"
            )
        return {name: value for name, value in stored.items() if name != VARIANT and not name.startswith("dsa_")}


def freeze_but_indexers(config: RunConfig, model: GPTModel, groups: ParallelGroups, *, initialise: bool) -> None:
    """With ``dsa_indexer_warmup``, freeze a stage but its indexers; see ``Feature.change_stage``."""
    if config.model.section(SparseAttentionConfig).dsa_indexer_warmup:
        for name, parameter in model.named_global_parameters():
            parameter.requires_grad_(INDEXER in name)
