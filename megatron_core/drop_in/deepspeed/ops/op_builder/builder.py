"""DeepSpeed's builders of kernels by name: they say what is available; kernels are built by ``make install``."""

from typing import Any, NoReturn

import torch

from megatron_core.errors import ConfigError


class OpBuilder:
    """An operation of DeepSpeed."""

    NAME = "op"
    available = False
    """Whether this project has an optimizer or a feature for which programs ask for the operation."""

    @staticmethod
    def installed_rocm_version() -> list[int]:
        """Return the major and minor version of ROCm that torch was built for; [0, 0] without ROCm."""
        version = torch.version.hip
        return [0, 0] if version is None else [int(part) for part in version.split(".")[:2]]

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch was built for ROCm."""
        return torch.version.hip is not None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the optimizer or the feature works on this machine."""
        return self.available

    def load(self, verbose: bool = False) -> NoReturn:
        """Raise ``ConfigError``: the kernels have another interface."""
        raise ConfigError(
            f"{type(self).__name__}().load() is not available in megatron_core.drop_in: use the optimizers of "
            "deepspeed.ops and the keys of the JSON; kernels are built by make install (docs/kernels.md)"
        )

    def builder(self) -> NoReturn:
        """As ``load``."""
        self.load()


def _builder(class_name: str, name: str, available: bool = False) -> Any:
    return type(class_name, (OpBuilder,), {"NAME": name, "available": available, "__module__": __name__})


AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io", available=True)
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", available=True)
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", available=True)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", available=True)
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", available=True)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", available=True)
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", available=True)
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn")
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer")
GDSBuilder = _builder("GDSBuilder", "gds")
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference")
InferenceCoreBuilder = _builder("InferenceCoreBuilder", "inference_core_ops")
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", "cutlass_ops")
PinMemoryBuilder = _builder("PinMemoryBuilder", "pin_memory")
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer")
RaggedOpsBuilder = _builder("RaggedOpsBuilder", "ragged_device_ops")
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", "ragged_ops")
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd")
SparseAttnBuilder = _builder("SparseAttnBuilder", "sparse_attn")
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference")
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", "stochastic_transformer")
TransformerBuilder = _builder("TransformerBuilder", "transformer")
UtilsBuilder = _builder("UtilsBuilder", "utils")

ALL_OPS: dict[str, type[OpBuilder]] = {each.NAME: each for each in OpBuilder.__subclasses__()}
"""Builders by the names of their operations."""

COMPATIBLE_OPS = {name: builder().is_compatible() for name, builder in ALL_OPS.items()}
"""Operations by name: whether their optimizers or features are available here."""
