"""Rotary positions with YaRN's frequencies."""

from typing import Any

from torch import Tensor

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron_core.config import ModelConfig
from megatron_core.transformer.rotary import yarn_frequencies, yarn_magnitude, yarn_mscale


class YarnRotaryEmbedding(RotaryEmbedding):
    """Angles of ``RotaryEmbedding`` with YaRN's frequencies (Peng et al. 2023), and the factor on cosine and sine."""

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        use_cpu_initialization: bool = False,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        correction_range_round_to_int: bool = True,
        cp_group: Any = None,
    ) -> None:
        super().__init__(
            kv_channels,
            rotary_percent,
            rotary_interleaved,
            seq_len_interpolation_factor,
            rotary_base,
            cp_group=cp_group,
        )
        settings = ModelConfig(
            use_rope_scaling=True,
            rope_scaling_type="yarn",
            rotary_base=rotary_base,
            rope_scaling_factor=scaling_factor,
            original_max_position_embeddings=original_max_position_embeddings,
            yarn_beta_fast=beta_fast,
            yarn_beta_slow=beta_slow,
            yarn_correction_range_round_to_int=correction_range_round_to_int,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
        )
        self.frequencies, self.magnitude = yarn_frequencies(self.frequencies, settings), yarn_magnitude(settings)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False) -> tuple[Tensor, float]:  # type: ignore[override]
        """Return (angles ``[s, 1, 1, r]``, factor on cosine and sine); ``packed_seq`` has no effect."""
        return super().forward(max_seq_len, offset), self.magnitude


def _yarn_get_mscale(scale: float = 1, mscale: float = 1) -> float:
    return yarn_mscale(scale, mscale)
