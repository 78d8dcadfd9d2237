"""Injected transmission faults: one received tensor is zeroed, shifted, outdated, late, lost, or has a flipped bit."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core.cpu_ranks import interrupt
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.resilience.settings import LINK_AXES, LINK_DAMAGES, LINK_DELAYS

FEWEST = 16
"""Elements of the smallest tensor that is damaged: wrong counts and flags would end a run instead of changing it."""
DELAY = 2.0
"""Seconds by which a transfer is delayed."""
_BITS = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""The lowest bit of the exponent: an element is doubled or halved."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GROUPS = {"tp": ("tp",), "dp": ("dp", "dp-cp", "edp"), "cp": ("cp",), "ep": ("ep", "etp-ep")}


@dataclass(frozen=True)
class LinkFault:
    """A fault in the next message over an axis that it changes."""

    axis: str
    """One of ``LINK_AXES``."""
    damage: str
    """One of ``LINK_DAMAGES`` and ``LINK_DELAYS``."""

    @classmethod
    def of(cls, fault: str) -> "LinkFault | None":
        """The fault of a kind of ``--inject-fault``, such as ``tp-zeros``; None for other kinds."""
        axis, _, damage = fault.partition("-")
        return cls(axis, damage) if axis in LINK_AXES and damage in (*LINK_DAMAGES, *LINK_DELAYS) else None


class LinkFaults:
    """The faults of this rank."""

    def __init__(self) -> None:
        self.remembers = False
        """Whether the previous tensor of each kind is kept, because an outdated one will be injected."""
        self._armed: list[LinkFault] = []
        self._axes: dict[Group, set[str]] = {}
        self._previous: dict[tuple[object, ...], Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether received tensors may be damaged or must be remembered."""
        return self.remembers or bool(self._armed)

    def name_groups(self, groups: ParallelGroups) -> None:
        """Find the groups of each axis."""
        self._axes.clear()
        for axis, names in _GROUPS.items():
            axis_groups = [groups.group(name) for name in names]
            axis_groups += [groups.shard_group(name) for name in names if name in ("dp", "dp-cp", "edp")]
            axis_groups += [groups.context.heads, groups.context.ring] if axis == "cp" else []
            for group in axis_groups:
                if group.size() > 1:
                    self._axes.setdefault(group, set()).add(axis)

    def arm(self, fault: LinkFault) -> None:
        """Inject ``fault`` into the next tensor that it changes."""
        self._armed.append(fault)

    def disarm(self) -> list[LinkFault]:
        """Return the faults that changed no tensor, and forget them; unless ``remembers``, also previous tensors."""
        left = self._armed
        self._armed = []
        if not self.remembers:
            self._previous.clear()
        return left

    def apply(self, what: str, group: Group, delivered: Sequence[Tensor | None]) -> None:
        """Damage one of the ``delivered`` that a collective has delivered, if a fault is due.

        Expert-parallel links are damaged in all-to-alls only, because the group of an axis may have the same ranks as
        that of another.
        """
        axes = self._axes.get(group, set())
        self._apply((group, what), axes - {"ep"} if what != "all-to-all" else axes, delivered)

    def apply_to_message(self, sender: int, receiver: int, data: Tensor) -> None:
        """Damage a message between pipeline stages, if a fault is due."""
        self._apply((sender, receiver), {"pp"}, [data])

    def _apply(self, link: tuple[object, ...], axes: set[str], delivered: Sequence[Tensor | None]) -> None:
        for number, tensor in enumerate(delivered):
            if (
                tensor is None
                or tensor.numel() < FEWEST
                or not (tensor.is_floating_point() or tensor.dtype == torch.uint8)
            ):
                continue
            key = (*link, number, tensor.numel(), tensor.dtype)
            arrived = tensor.clone() if self.remembers else None
            for fault in [fault for fault in self._armed if fault.axis in axes]:
                if fault.damage in LINK_DELAYS:
                    self._armed.remove(fault)
                    wait_for_transfer(is_lost=fault.damage == "lost")
                elif damage_tensor(tensor, fault.damage, self._previous.get(key)):
                    self._armed.remove(fault)
            if arrived is not None:
                self._previous[key] = arrived


def wait_for_transfer(*, is_lost: bool) -> None:
    """Wait as for a transfer that arrives late or never, until the wait is interrupted."""
    until = math.inf if is_lost else time.monotonic() + DELAY
    while time.monotonic() < until:
        interrupt.raise_if_requested()
        time.sleep(0.02)


def damage_tensor(x: Tensor, damage_kind: str, previous: Tensor | None = None) -> bool:
    """Damage ``x`` in place; return whether that changed a bit. ``previous``: the tensor received before it.

    A bit of the largest element is flipped, of bytes one in the middle. A doubled element that is itself a rounding
    error, such as the gradient of a bias of keys, is below the bound of a reduce-scatter's check.
    """
    bits = x.detach().view(-1).view(_INTEGERS[x.element_size()])
    before = bits.clone()
    if damage_kind == "zeros":
        bits.zero_()
    elif damage_kind == "shifted":
        bits.copy_(before.roll(1))
    elif damage_kind == "flipped":
        index = x.detach().abs().argmax() if x.is_floating_point() else bits.numel() // 2
        if not x.is_floating_point() or x.view(-1)[index]:  # 0 would become the smallest number
            bits[index] ^= 1 << _BITS.get(x.dtype, 0)
    elif previous is not None:
        bits.copy_(previous.view(-1).view(bits.dtype))
    return not torch.equal(bits, before)
