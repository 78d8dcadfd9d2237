"""Rules of multi-token prediction."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.features.multi_token.settings import MultiTokenConfig


def multi_token_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Embeddings that the layers of multi-token prediction do not have."""
    model = config.model.section(MultiTokenConfig)
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield (
            f"mtp_num_layers={model.mtp_num_layers} cannot be used with position_embedding_type=learned_absolute, "
            "whose table is on the first stage alone; use --position-embedding-type rope"
        )
    if model.mtp_num_layers and model.embedding_layernorm:
        yield (
            f"mtp_num_layers={model.mtp_num_layers} cannot be used with embedding_layernorm=True: layers of "
            "multi-token prediction have their own norm of embeddings; remove one of them"
        )
