"""The loss over a split vocabulary with the name of Megatron's fused loss."""

from torch import Tensor

from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Group | None = None
) -> Tensor:
    """Return losses ``[s, b]`` of this rank's logits ``[s, b, v/tp]``."""
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)
