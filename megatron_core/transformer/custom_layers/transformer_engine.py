"""For Megatron Core's users: ``megatron_core.extensions.transformer_engine`` under its former path."""

from megatron_core.lazy import lazy_names

__getattr__ = lazy_names(
    "megatron_core.extensions",
    {
        "transformer_engine": (
            *("HAVE_TE", "SplitAlongDim", "TEColumnParallelLinear", "TEDotProductAttention", "TELinear", "TENorm"),
            *("TELayerNormColumnParallelLinear", "TERowParallelLinear", "te_checkpoint"),
        )
    },
)
