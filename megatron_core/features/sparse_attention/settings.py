"""Settings of attention to the keys that an indexer selects."""

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.model import ModelConfig
from megatron_core.config.setting import Condition, Resume, given, section, setting

INDEXER_LOSS = "indexer_loss"
"""Name of the indexers' auxiliary loss."""
INDEXER = ".indexer."
"""Occurs in the names of all parameters of indexers, and in no other name."""


SPARSE_ATTENTION = Condition("--experimental-attention-variant dsa", lambda run: run.model.has_sparse_attention)
HAS_INDEXER_LOSS = given("dsa_indexer_loss_coeff", "X")


@dataclass(frozen=True, kw_only=True)
@section(needs=SPARSE_ATTENTION, resume=Resume.FUNCTION)
class SparseAttentionConfig(ModelConfig):
    """DeepSeek sparse attention: an indexer with few channels selects the keys of each query (DeepSeek-AI 2025,
    DeepSeek-V3.2, section 2.1)."""

    dsa_indexer_n_heads: int = setting(64, r.SIZE, resume=Resume.TENSORS)
    """Number of query heads of the indexer; they share one key."""
    dsa_indexer_head_dim: int = setting(128, r.SIZE, resume=Resume.TENSORS)
    """Channels of a head of the indexer; the first --qk-pos-emb-head-dim have rotary positions."""
    dsa_indexer_topk: int = setting(2048, r.SIZE)
    """Number of keys that a query attends to; all keys if it is --seq-length or more."""
    dsa_indexer_rope_interleaved: bool = setting(False)
    """Rotate pairs of adjacent channels in the indexer (GLM-5); default: channels of the two halves (DeepSeek-V3.2)."""
    dsa_indexer_k_norm_epsilon: float | None = setting(None, r.POSITIVE)
    """Added to the variance in the LayerNorm of the indexer's keys; default: --norm-epsilon."""
    dsa_indexer_loss_coeff: float = setting(0.0, r.from_0(1e6), when=c.TRAINING, resume=Resume.REPORTED)
    """Train the indexers with this times the mean divergence of their softmax from the mean attention weights of all
    heads; 0: the indexers are not trained."""
    dsa_indexer_use_sparse_loss: bool = setting(False, needs=HAS_INDEXER_LOSS, when=c.TRAINING, resume=Resume.REPORTED)
    """Compute this loss over the selected keys; default: over all keys."""
    dsa_indexer_warmup: bool = setting(False, needs=HAS_INDEXER_LOSS, resume=Resume.REPORTED)
    """Attend to all keys and train only the indexers, with all other weights frozen, before the indexers select keys
    (dense warm-up of DeepSeek-V3.2)."""

    @property
    def has_sparse_attention(self) -> bool:
        """Whether queries attend to the keys that an indexer selects."""
        return self.experimental_attention_variant == "dsa"

    @property
    def attention_name(self) -> str:
        """The name of the kind of attention in all layers."""
        return "sparse_latent" if self.has_sparse_attention else super().attention_name

    @property
    def trains_indexers(self) -> bool:
        """Whether the indexers of sparse attention have a loss."""
        return self.has_sparse_attention and self.dsa_indexer_loss_coeff > 0
