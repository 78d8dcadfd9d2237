"""The section of inference, which is not supported."""

from dataclasses import dataclass

from megatron_core.drop_in.unsupported import unsupported

_refuse = unsupported(
    "an InferenceSetupConfig is not supported: pass the options of generation to megatron-generate or megatron-serve"
)


@dataclass(kw_only=True)
class InferenceSetupConfig:
    """Settings of inference; building an instance raises ConfigError."""

    def __post_init__(self) -> None:
        _refuse()
