"""Parts of DeepSpeed that do not exist here: importing one is an error that says what to use."""

from typing import NoReturn


def refuse(module: str, instead: str) -> NoReturn:
    """Raise ``ImportError`` with the way out."""
    raise ImportError(f"{module} is not available in megatron_core.drop_in: {instead}", name=module)
