"""Saving in the background, which ``megatron-train`` does with ``--async-save``."""


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Return: ``save_checkpoint`` of a program has written its files when it returns."""
