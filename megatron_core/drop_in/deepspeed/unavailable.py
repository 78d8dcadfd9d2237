"""Parts of DeepSpeed that do not exist here: an import or a call is an error that says what to use."""

from typing import Any, NoReturn

from megatron_core.errors import ConfigError


def refuse(module: str, instead: str) -> NoReturn:
    """Raise ``ImportError`` with the way out."""
    raise ImportError(f"{module} is not available in megatron_core.drop_in: {instead}", name=module)


def refused(path: str, instead: str) -> type:
    """Return a class for programs that import ``path``; its construction, or a call, is a ``ConfigError``."""
    module, _, name = path.rpartition(".")

    def construct(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(f"{path} is not available in megatron_core.drop_in: {instead}")

    members = {"__init__": construct, "__module__": module, "__doc__": f"Not available: {instead}."}
    return type(name, (), members)
