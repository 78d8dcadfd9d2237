"""Indexers for a model that was trained without sparse attention: they are drawn, all other weights are loaded."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_core.checkpoint import CheckpointReader, TensorBox
from megatron_core.checkpoint.formats import OtherReader
from megatron_core.checkpoint.host_copy import HostCopy
from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.sparse_attention import INDEXER
from megatron_core.errors import CheckpointError
from megatron_core.models import GPTModel
from megatron_core.parallel.initialization import draw_by_name

Weights = CheckpointReader | OtherReader | HostCopy
VARIANT = "experimental_attention_variant"


def has_new_indexers(stored: Mapping[str, Any], model: ModelConfig) -> bool:
    """Whether ``model`` has indexers and the model with the settings ``stored`` has full attention in all layers."""
    return model.has_sparse_attention and stored.get(VARIANT, "dsa") is None


def without_indexers(stored: Mapping[str, Any], config: RunConfig, *, only_weights: bool) -> dict[str, Any]:
    """Return the settings of a stored model that those of a run with new indexers must equal.

    ``only_weights``: whether the run starts with the stored weights, and does not resume the training. Errors:
    ``CheckpointError`` if it does, or if it would not train the indexers.
    """
    if not only_weights:
        raise CheckpointError(
            f"{VARIANT}=dsa, but the checkpoint has no indexers; to start with its weights and new indexers, add "
            "--finetune; to resume its training, remove --experimental-attention-variant"
        )
    if not config.model.trains_indexers:
        raise CheckpointError(
            f"dsa_indexer_loss_coeff={config.model.dsa_indexer_loss_coeff}, but the checkpoint has no indexers, so "
            "new ones would choose keys at random; train them with --dsa-indexer-loss-coeff, first with "
            "--dsa-indexer-warmup"
        )
    return {name: value for name, value in stored.items() if name != VARIANT and not name.startswith("dsa_")}


def lacks_indexers(reader: Weights, model: ModelConfig) -> bool:
    """Whether the weights in ``reader`` are of the same model without its indexers."""
    return has_new_indexers(reader.state.get("config", {}), model)


def is_of_indexer(name: str) -> bool:
    """Whether a parameter, or a piece of a checkpoint, belongs to an indexer."""
    return INDEXER in name


def draw_indexers(base: Weights | None, stages: Iterable[GPTModel], config: RunConfig) -> None:
    """Initialize the indexers of a rank's stages if ``base``, from which the weights are loaded, lacks them.

    Deferred parameters are drawn when they are allocated.
    """
    for stage in stages if base is not None and lacks_indexers(base, config.model) else ():
        for name, parameter in stage.named_global_parameters():
            if is_of_indexer(name) and not parameter.is_meta:
                draw_by_name(name, parameter, config.training.seed)


def outside_of_indexers(pieces: Iterable[TensorBox], lacks: bool) -> Iterator[TensorBox]:
    """The pieces that a checkpoint has if it ``lacks`` indexers; else all."""
    return (piece for piece in pieces if not (lacks and is_of_indexer(piece.name)))
