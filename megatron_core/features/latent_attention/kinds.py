"""The sizes of latent attention."""

from megatron_core.config.attention import AttentionKind, Projection
from megatron_core.config.model import ModelConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig


class MultiLatent(AttentionKind):
    """Keys and values from one latent of each token (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1)."""

    name = "latent"
    has_own_head_sizes = True
    model: LatentAttentionConfig

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model.section(LatentAttentionConfig))

    @property
    def query_head_size(self) -> int:
        """Channels without and with rotary positions."""
        return self.model.qk_head_dim + self.model.qk_pos_emb_head_dim

    @property
    def value_head_size(self) -> int:
        """Channels of a value head, and of a head's attention output."""
        return self.model.v_head_dim

    @property
    def has_rotary(self) -> bool:
        """True: some channels of each head have rotary positions in any case."""
        return True

    @property
    def rotary_head(self) -> tuple[int, str]:
        """The channels with rotary positions."""
        return self.model.qk_pos_emb_head_dim, "qk_pos_emb_head_dim"

    def cached_elements(self, tp: int) -> int:
        """The latent and the key channels with rotary positions, the same on every rank."""
        return self.model.kv_lora_rank + self.model.qk_pos_emb_head_dim

    def projections(self, tp: int) -> list[Projection]:
        """Projections down to the latents, on every rank, and up to the heads."""
        model, heads = self.model, self.model.num_attention_heads // tp
        hidden, rank, q_rank = model.hidden_size, model.kv_lora_rank, model.q_lora_rank
        queries = "heads x (qk_head_dim + qk_pos_emb_head_dim)"
        down = [] if q_rank is None else [Projection(hidden, q_rank, module="linear_q_down_proj")]
        query_module = "linear_q_proj" if q_rank is None else "linear_q_up_proj"
        return [
            *down,
            Projection(q_rank or hidden, heads * self.query_head_size, "outputs", False, queries, query_module),
            Projection(hidden, rank + model.qk_pos_emb_head_dim, module="linear_kv_down_proj"),
            Projection(
                rank,
                heads * (model.qk_head_dim + model.v_head_dim),
                "outputs",
                width="heads x (qk_head_dim + v_head_dim)",
                module="linear_kv_up_proj",
            ),
            self.output_projection(tp),
        ]

    def norms(self, tp: int) -> tuple[int, ...]:
        """Norms of the latents."""
        ranks = [rank for rank in (self.model.q_lora_rank, self.model.kv_lora_rank) if rank is not None]
        return tuple(ranks) if self.model.qk_layernorm else ()

    def saved(self) -> tuple[int, int]:
        """The latents, twice if they are normalized; inputs and outputs of the core attention."""
        model = self.model
        latents = ((model.q_lora_rank or 0) + model.kv_lora_rank) * (2 if model.qk_layernorm else 1)
        if model.recomputes("mla_up_proj"):
            return latents, model.num_attention_heads * self.value_head_size
        return latents, self.core_elements()
