"""Backends of torch.distributed that features add (``Feature.transports``)."""

from typing import Protocol

import torch.distributed as dist

from megatron_core.feature import features, load_hook


class Transport(Protocol):
    """The module of a backend."""

    def register(self) -> None:
        """Make the backend known to torch.distributed."""

    def unavailable_reason(self) -> str | None:
        """Reason why the groups of the world use another backend; None if they do not."""

    def describe(self) -> str:
        """A phrase about the backends of the world's groups."""


def transport(backend: str) -> Transport | None:
    """The module of ``backend``; None if no feature has it."""
    # The core names no backend of a feature; it only asks whether one is registered.
    hooks = {name: hook for feature in features() for name, hook in feature.transports.items()}
    return load_hook(hooks[backend]) if backend in hooks else None


def describe_transport() -> str:
    """A phrase about the backends of the world's groups."""
    backend = dist.get_backend()
    module = transport(backend)
    return str(backend) if module is None else module.describe()
