"""The sizes of sparse attention."""

from megatron_core.config.attention import Projection
from megatron_core.config.model import ModelConfig
from megatron_core.features.latent_attention.kinds import MultiLatent
from megatron_core.features.sparse_attention.settings import SparseAttentionConfig


class SparseLatent(MultiLatent):
    """Latent attention to the keys that an indexer selects (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1)."""

    name = "sparse_latent"

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.sparse = model.section(SparseAttentionConfig)

    def cached_elements(self, tp: int) -> int:
        """The latent, the shared key channels, and the indexer's key."""
        return super().cached_elements(tp) + self.sparse.dsa_indexer_head_dim

    def projections(self, tp: int) -> list[Projection]:
        """The projections of latent attention, and of the indexer, which every rank has."""
        model = self.model
        sparse = self.sparse
        heads, channels, frozen = sparse.dsa_indexer_n_heads, sparse.dsa_indexer_head_dim, not sparse.trains_indexers
        sizes = {
            "linear_wq_b": (model.q_lora_rank or model.hidden_size, heads * channels),
            "linear_wk": (model.hidden_size, channels),
            "linear_weights_proj": (model.hidden_size, heads),
        }
        indexer = [
            Projection(*size, module=f"core_attention.indexer.{name}", frozen=frozen) for name, size in sizes.items()
        ]
        return [*indexer, *super().projections(tp)]

    def vectors(self, tp: int) -> int:
        """Weight and bias of the LayerNorm of the indexer's keys."""
        return super().vectors(tp) + 2 * self.sparse.dsa_indexer_head_dim * self.sparse.trains_indexers

    def frozen_vectors(self) -> int:
        """Weight and bias of the LayerNorm if the indexers are not trained."""
        return 2 * self.sparse.dsa_indexer_head_dim * (not self.sparse.trains_indexers)

    def score_flops(self, keys: int) -> tuple[int, int]:
        """Products of the selected keys, and scores of the indexer."""
        sparse = self.sparse
        scores, values = super().score_flops(min(keys, sparse.dsa_indexer_topk))
        return scores + 2 * keys * sparse.dsa_indexer_n_heads * (sparse.dsa_indexer_head_dim + 1), values

    def saved(self) -> tuple[int, int]:
        """Elements of latent attention, and with the loss the indexer's queries, keys and weights."""
        replicated, of_heads = super().saved()
        sparse = self.sparse
        own = (sparse.dsa_indexer_n_heads + 2) * sparse.dsa_indexer_head_dim + sparse.dsa_indexer_n_heads
        return replicated + own * sparse.trains_indexers, of_heads
