"""The tokens of a micro-batch as an objective sees them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_core.errors import DataError
from megatron_core.parallel.collectives import paired
from megatron_core.parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The tokens of one micro-batch on this rank, ``[b, n]`` for b rows with n local positions.

    ``batch["advantages"]`` is the value of this name of each token (``Trajectory.values``). With context parallelism a
    trajectory lies on several ranks: use ``trajectory_sum`` and ``trajectory_mean`` for sums over its tokens.
    """

    mask: Tensor
    """``[b, n]``, 1 where a token is learned, else 0."""
    trajectory: Tensor
    """``[b, n]`` int64, the number of the trajectory of each token in this micro-batch; the last number is padding."""
    num_trajectories: int
    """Number of trajectories in the micro-batch, with the padding."""
    values: Mapping[str, Tensor]
    cp_group: Group
    """The ranks that have the other tokens of these rows."""
    entropy: Tensor | None = None
    """``[b, n]``, the entropy of the distribution of each token in nats; None if the objective does not use it."""
    reported: dict[str, Tensor] = field(default_factory=dict)
    """Sums over learned tokens, by the name of the metric."""

    def __getitem__(self, name: str) -> Tensor:
        """The value ``name`` of each token, ``[b, n]``; 0 where a token is not learned."""
        if name not in self.values:
            raise DataError(
                f"the objective reads the value {name!r} of each token, and the trajectories have "
                f"{sorted(self.values)}; give it to each Trajectory"
            )
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def trajectory_sum(self, x: Tensor) -> Tensor:
        """For each token the sum of ``x`` over the learned tokens of its trajectory: ``[b, n]`` -> ``[b, n]``."""
        sums = x.new_zeros(self.num_trajectories).index_add(0, self.trajectory.flatten(), (x * self.mask).flatten())
        # Each rank's losses depend on the whole sum, so its gradient is the sum of theirs.
        return paired(sums, self.cp_group, "sum", "sum")[self.trajectory]

    def trajectory_mean(self, x: Tensor) -> Tensor:
        """As ``trajectory_sum``, divided by the number of learned tokens."""
        return self.trajectory_sum(x) / self.trajectory_sum(torch.ones_like(x)).clamp_min(1.0)

    def report(self, name: str, x: Tensor) -> None:
        """Report the mean of ``x`` ``[b, n]`` over the learned tokens of the global batch as the metric ``name``."""
        self.reported[name] = (x.detach() * self.mask).sum(dtype=torch.float64)


TokenLoss = Callable[[Tensor, TokenBatch], Tensor]
"""Log-probabilities of the tokens ``[b, n]`` and their ``TokenBatch`` -> loss of each token ``[b, n]``."""
