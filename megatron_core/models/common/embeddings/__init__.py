"""For Megatron Core's users: embeddings and positions."""

from megatron_core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron_core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
