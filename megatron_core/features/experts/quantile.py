"""Balance of the experts' load by quantiles of the router's logits, without a loss.

Shapes: T tokens, E experts, k choices per token.
"""

import torch
from torch import Tensor

from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group


def quantile_choice(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 ``[T, k]``, and the balancing bias of each expert, ``[E]``.

    A token chooses the k experts with the highest ``logits`` ``[T, E]`` minus ``bias`` ``[E]``. An expert with the new
    bias would get its share, T k / E tokens: it is the quantile over the tokens of its logit minus the token's highest
    value that is not chosen. ``k`` must be less than E.
    Source: a step of dual coordinate descent for balanced assignment, as Megatron Core's ``qb_dual_update``.
    """
    tokens, experts = logits.shape
    highest = (logits - bias).topk(k + 1)
    share = tokens * k // experts
    balanced = (logits - highest.values[:, -1:]).topk(share + 1, dim=0).values[-1]
    return highest.indices[:, :-1], balanced


class BalancingBiases:
    """The sum of the balancing biases of the micro-batches of a step, ``[E]``, on one rank."""

    def __init__(self, num_experts: int, device: torch.device | str) -> None:
        self.sum = torch.zeros(num_experts, dtype=torch.float64, device=device)
        self.count = 0

    def add(self, balanced: Tensor) -> None:
        """Add the biases of a micro-batch."""
        self.sum += balanced
        self.count += 1

    def reset(self) -> None:
        """Forget the micro-batches since the last update."""
        self.sum.zero_()
        self.count = 0

    @torch.no_grad()
    def update(self, bias: Tensor, memory: float, group: Group) -> None:
        """Replace ``bias`` by memory bias + (1 - memory) mean, minus its mean over the experts, and reset.

        The mean is over the micro-batches of all ranks of ``group``; a collective call of them.
        """
        mean = self.sum / max(self.count, 1)
        all_reduce_(mean, group)
        updated = memory * bias.double() + (1 - memory) * mean / group.size()
        bias.copy_(updated - updated.mean())
        self.reset()
