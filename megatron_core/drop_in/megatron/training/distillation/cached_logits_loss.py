"""Distillation from stored logits of a teacher, which is not supported."""

from typing import Any

from megatron_core.errors import ConfigError


class LossFuncCallable:
    """The loss for stored logits; building it raises ConfigError."""

    def __init__(self, logprobs_dir: Any = None, **settings: Any) -> None:
        raise ConfigError(f"logits_load_dir={logprobs_dir!r} is not supported; leave --logits-load-dir out")
