"""Recurrent layers: gated delta nets and products, Kimi delta attention, Mamba 2, convolutions, and parallel mixers."""

from megatron_core.feature import Feature
from megatron_core.features.recurrent.rules import has_recurrence, recurrent_problems
from megatron_core.features.recurrent.settings import RecurrentConfig

RECURRENT = Feature(
    name="recurrent",
    settings=RecurrentConfig,
    is_used=has_recurrence,
    problems=recurrent_problems,
    spellings="megatron_core.features.recurrent.spellings:PatternSpellings",
    attention_kinds={
        "gated_delta_net": "megatron_core.features.recurrent.kinds:GatedDeltaNetKind",
        "kimi_delta_attention": "megatron_core.features.recurrent.kinds:KimiDelta",
        "mamba2": "megatron_core.features.recurrent.kinds:Mamba2",
        "gated_delta_product": "megatron_core.features.recurrent.kinds:GatedDeltaProductKind",
        "short_convolution": "megatron_core.features.recurrent.kinds:ShortConvolutionKind",
        "attention_and_mamba2": "megatron_core.features.recurrent.kinds:AttentionAndMamba",
    },
    layers={
        "gated_delta_net": "megatron_core.features.recurrent.gated_delta_net:GatedDeltaNet",
        "kimi_delta_attention": "megatron_core.features.recurrent.gated_delta_net:KimiDeltaAttention",
        "mamba2": "megatron_core.features.recurrent.mamba:MambaMixer",
        "gated_delta_product": "megatron_core.features.recurrent.gated_delta_product:GatedDeltaProduct",
        "short_convolution": "megatron_core.features.recurrent.short_convolution:ShortConvolution",
        "attention_and_mamba2": "megatron_core.features.recurrent.parallel_mixers:ParallelMixers",
    },
)
