"""The manager of offloaded activations, of which there is none: the engine's layers offload their activations."""

from typing import ClassVar

from megatron_core.drop_in.unsupported import Unsupported


class PipelineOffloadManager(Unsupported):
    """Stands for Megatron's class; programs ask for ``OFFLOAD_MGR``, which is None."""

    OFFLOAD_MGR: ClassVar[None] = None
    message = "PipelineOffloadManager is not needed; set offload_modules in the configuration"

    @classmethod
    def get_instance(cls) -> None:
        """Raise ConfigError."""
        cls()

    @classmethod
    def reset_instance(cls) -> None:
        """Do nothing: there is no manager."""
