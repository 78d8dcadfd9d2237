"""Groups of data-parallel replicas that train on their own and exchange their weights every few steps."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(needs=given("outer_steps", "N"), resume=Resume.REPORTED)
class OuterConfig:
    """Groups of replicas that exchange their weights every few steps."""

    outer_steps: int = setting(0, r.COUNT_FROM_0, when=c.TRAINING)
    """Number of steps between two exchanges of --outer-groups, which otherwise train on their own and, without
    --max-bad-steps and --recover, do not wait for one another (DiLoCo, Douillard et al. 2023). 0: all replicas take
    each step together."""
    outer_groups: int = setting(2, r.SMALL_COUNT)
    """With --outer-steps: number of groups. Each has world size / this number of neighbouring ranks, all sizes of the
    layout inside it, its share of each global batch, and its own optimizer state."""
    outer_lr: float = setting(0.7, r.POSITIVE)
    """Learning rate of the update of the global weights after an exchange."""
    outer_momentum: float = setting(0.9, r.BELOW_1)
    """Nesterov momentum of this update; 0: none."""
    outer_fragments: int = setting(1, r.SMALL_COUNT)
    """Number of parts of the model that are exchanged at different steps, evenly distributed over --outer-steps; layer
    i belongs to part i mod this number (Streaming DiLoCo, Douillard et al. 2025)."""
    outer_delay: int = setting(0, r.COUNT_FROM_0)
    """Number of steps that are computed while an exchange is in flight."""
    outer_alpha: float = setting(0.0, r.BELOW_1)
    """Share of a group's own weights after an exchange; the rest are the global weights."""
    outer_exchange: Literal["full", "bf16", "fp8", "fp4"] = setting("full")
    """Numbers that groups exchange. full: in the dtype of the main weights. bf16: rounded. fp8 (e4m3), fp4 (e3m0): with
    a scale for each tensor. Means are computed in the dtype of the main weights."""

    @property
    def num_groups(self) -> int:
        """Number of groups; 1 if all replicas take each step together."""
        return self.outer_groups if self.outer_steps else 1

    def sent_at(self, fragment: int, step: int) -> bool:
        """Whether the exchange of a fragment starts after ``step``, counted from 1."""
        return (step - self._offset(fragment)) % self.outer_steps == 0

    def meets_at(self, step: int) -> bool:
        """Whether any exchange starts after ``step``, counted from 1."""
        return any(self.sent_at(fragment, step) for fragment in range(self.outer_fragments))

    def applied_at(self, fragment: int, step: int) -> bool:
        """Whether the global weights of a fragment are updated after ``step``, if its exchange has started."""
        return self.sent_at(fragment, step - self.outer_delay)

    def _offset(self, fragment: int) -> int:
        """Step of the first exchange of a fragment: i H / P; 0 stands for H (Douillard et al. 2025, algorithm 2)."""
        return fragment * self.outer_steps // self.outer_fragments
