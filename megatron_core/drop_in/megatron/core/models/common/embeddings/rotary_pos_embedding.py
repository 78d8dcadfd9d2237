"""The angles of rotary positions."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.common.embeddings.rope_utils import (
    apply_rotary_pos_emb,
    get_pos_emb_on_this_cp_rank,
)
from megatron_core.drop_in.unsupported import Unsupported
from megatron_core.errors import ConfigError
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.transformer.rotary import llama3_frequencies, plain_frequencies


class RotaryEmbedding(nn.Module):
    """Angles position x base^(-2i/r) of the first ``rotary_percent`` of the channels of a head, each twice.

    They are the ``rotary_pos_emb`` of ``TransformerBlock`` and ``TransformerLayer``; ``GPTModel`` computes its own.
    ``use_cpu_initialization`` has no effect. With ``cp_group`` they are the angles of this rank's tokens.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: Group | None = None,
    ) -> None:
        super().__init__()
        frequencies = plain_frequencies(int(kv_channels * rotary_percent), float(rotary_base))
        if rope_scaling:
            frequencies = llama3_frequencies(frequencies, rope_scaling_factor)
        self.frequencies = frequencies / (seq_len_interpolation_factor or 1.0)
        self.rotary_interleaved, self.cp_group = rotary_interleaved, cp_group

    @property
    def inv_freq(self) -> Tensor:
        """The frequencies ``[r/2]`` in float32."""
        return self.frequencies.float()

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of ``max_seq_len`` positions from ``offset``, each once: ``[s, r/2]`` float64."""
        positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float64, device=self.frequencies.device)
        return torch.outer(positions, self.frequencies)

    def get_cos_sin(self, max_seq_len: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of ``get_freqs_non_repeated``."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return angles.cos(), angles.sin()

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: Any,
        packed_seq_params: Any = None,
    ) -> int:
        """Return the number of positions for ``forward``: of the longest document, or of whole sequences of which
        ``transformer_input`` ``[s, b, h]``, or ``transformer.input_tensor`` on a later stage, is this rank's part.

        Raises ConfigError for an ``inference_context``: the engine computes positions in generation.
        """
        if inference_context is not None:
            raise ConfigError("get_rotary_seq_len: inference_context is not supported; generate with the engines")
        if packed_seq_params is not None and packed_seq_params.max_seqlen_q is not None:
            return int(max(packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv))
        received = getattr(transformer, "input_tensor", None)
        length = len(transformer_input if received is None else received)
        if transformer_config.sequence_parallel:
            length *= transformer_config.tensor_model_parallel_size
        return length * int(transformer_config.context_parallel_size)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of ``max_seq_len`` positions from ``offset``: ``[s, 1, 1, r]`` float64.

        Angle i is at the channels i and r/2 + i, or 2i and 2i + 1 with ``rotary_interleaved``.
        """
        split = SequenceSplit()
        if self.cp_group is not None:
            split = SequenceSplit(cp_rank=self.cp_group.rank(), cp_size=self.cp_group.size())
        angles = torch.outer((split.positions(max_seq_len) + offset).to(torch.float64), self.frequencies)
        twice = torch.stack([angles, angles], -1).flatten(1) if self.rotary_interleaved else torch.cat([angles] * 2, -1)
        return twice[:, None, None, :]


class MultimodalRotaryEmbedding(Unsupported, nn.Module):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = "multimodal models are not supported; use RotaryEmbedding for text"
