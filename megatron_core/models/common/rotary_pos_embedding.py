"""For Megatron Core's users: rotary positions under their former path."""

from megatron_core.models.common.embeddings import (
    RotaryEmbedding as RotaryEmbedding,
)
from megatron_core.models.common.embeddings import (
    apply_rotary_pos_emb as apply_rotary_pos_emb,
)
