"""Recurrent layers: gated delta nets, Kimi delta attention, Mamba 2, short convolutions, and mixers in parallel."""

from megatron_core.feature import Feature
from megatron_core.features.recurrent.rules import has_recurrence

RECURRENT = Feature(
    name="recurrent",
    is_used=has_recurrence,
    spellings="megatron_core.features.recurrent.spellings:PatternSpellings",
    layers={
        "gated_delta_net": "megatron_core.features.recurrent.gated_delta_net:GatedDeltaNet",
        "kimi_delta_attention": "megatron_core.features.recurrent.gated_delta_net:KimiDeltaAttention",
        "mamba2": "megatron_core.features.recurrent.mamba:MambaMixer",
        "short_convolution": "megatron_core.features.recurrent.short_convolution:ShortConvolution",
        "attention_and_mamba2": "megatron_core.features.recurrent.parallel_mixers:ParallelMixers",
    },
)
