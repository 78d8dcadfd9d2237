"""The flag for experimental features of Megatron Core; no feature here reads it."""

ENABLE_EXPERIMENTAL = False


def set_experimental_flag(flag: bool) -> None:
    """Set the flag."""
    globals()["ENABLE_EXPERIMENTAL"] = flag


def is_experimental_enabled() -> bool:
    """Return the flag."""
    return ENABLE_EXPERIMENTAL
