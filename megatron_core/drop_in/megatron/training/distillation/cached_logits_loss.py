"""Distillation from stored logits of a teacher, which is not supported."""

from megatron.core.unsupported import Unsupported


class LossFuncCallable(Unsupported):
    """The loss for stored logits."""

    message = "logits_load_dir is not supported; leave --logits-load-dir out"
