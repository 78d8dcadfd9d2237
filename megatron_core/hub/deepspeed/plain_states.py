"""Optimizer state without ZeRO, which DeepSpeed stores by numbers instead of names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError
from megatron_core.hub.deepspeed.shards import SETTINGS, Flat, Parts, Stored, is_plain, kinds_of, steps_of, whole_number

Order = Sequence[Sequence[str]]
"""Names of the parameters of each group of an optimizer."""


class PlainStates:
    """The state of an optimizer without ZeRO, and the float32 weights of 16-bit ones.

    ``content`` is the ``optimizer`` entry of a model file; ``module``: the weights by name.
    """

    def __init__(self, content: Mapping[str, Any], module: Mapping[str, Tensor]) -> None:
        self._module = module
        inner = content.get("optimizer_state_dict", content)
        groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(groups, list) or not groups:
            raise CheckpointError("the optimizer's entry has no param_groups; it must be of a torch optimizer")
        if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
            raise CheckpointError("a parameter group of the optimizer has no list params")
        state = inner.get("state")
        self._state = {n: s for n, s in state.items() if isinstance(s, Mapping)} if isinstance(state, Mapping) else {}
        self._numbers = [[n for n in group["params"] if isinstance(n, int)] for group in groups]
        self._fallback = whole_number(groups[0].get("step"))
        self.groups = [{name: group[name] for name in SETTINGS if name in group} for group in groups]
        wide = content.get("fp32_groups")
        self._wide = [item for item in wide if isinstance(item, list)] if isinstance(wide, list) else []
        flat = content.get("fp32_groups_flat")
        self._flat: list[Any] = flat if isinstance(flat, list) else []

    def named(self, orders: Iterable[Order]) -> Parts:
        """State by name, with the first of ``orders`` that fits shapes and values.

        Errors: ``CheckpointError`` if none fits.
        """
        for order in orders:
            parts_by_name = self._flat_parts(order) if self._flat else self._parts(order)
            if parts_by_name is not None:
                return parts_by_name
        raise CheckpointError(
            "without ZeRO, DeepSpeed stores the optimizer's state by numbers, and these do not fit the parameters; "
            "load it into an engine with the parameter groups of the training program, or load the weights alone"
        )

    def _parts(self, order: Order) -> Parts | None:
        """Parts if the tensors of each group fit ``order``; an order of one group fits any number of groups."""
        numbers = self._numbers
        wide = self._wide
        if len(order) == 1:
            numbers = [[n for group_items in numbers for n in group_items]]
            wide = [[t for group_items in wide for t in group_items]] * bool(wide)
        if [len(group_items) for group_items in numbers] != [len(group_items) for group_items in order]:
            return None
        result = Parts(groups=self.groups)
        for group, (group_numbers, names) in enumerate(zip(numbers, order, strict=True)):
            for position, (number, name) in enumerate(zip(group_numbers, names, strict=True)):
                weight = self._module.get(name)
                if weight is None:
                    return None
                if wide and not self._add_wide(result, wide, group, position, name, weight):
                    return None
                state = self._state.get(number, {})
                for state_kind in kinds_of(state):
                    if state[state_kind].shape != weight.shape or not is_plain(state[state_kind]):
                        return None
                    result.states.setdefault(state_kind, {})[name] = Stored.of(state[state_kind])
                result.steps.update(steps_of(state, self._fallback if state else None))
        return result

    @staticmethod
    def _add_wide(target: Parts, wide: list[list[Any]], group: int, position: int, name: str, weight: Tensor) -> bool:
        """Add the float32 weights if they are the given weights before rounding."""
        main = wide[group][position] if group < len(wide) and position < len(wide[group]) else None
        if not isinstance(main, Tensor) or not is_plain(main) or main.shape != weight.shape:
            return False
        target.main[name] = Stored.of(main)
        return torch.equal(main.to(weight.dtype), weight)

    def _flat_parts(self, order: Order) -> Parts | None:
        """As ``_parts`` for a fused optimizer, with one flat tensor for each group."""
        result = Parts(groups=self.groups)
        if len(order) != len(self._flat) or any(name not in self._module for names in order for name in names):
            return None
        for number, (names, flat) in enumerate(zip(order, self._flat, strict=True)):
            state = self._state.get(number, {})
            for state_kind in ("fp32", *kinds_of(state)):
                joined = Flat([flat if state_kind == "fp32" else state[state_kind]], f"{state_kind} of group {number}")
                offset = 0
                target = result.main if state_kind == "fp32" else result.states.setdefault(state_kind, {})
                for name in names:
                    weight = self._module[name]
                    target[name] = joined.stored(offset, tuple(weight.shape))
                    offset += weight.numel()
                if joined.numel != offset:
                    return None
            for name in names:
                weight = self._module[name]
                if not torch.equal(result.main[name].read().to(weight.dtype), weight):
                    return None
            result.steps.update(steps_of(state, self._fallback if state else None))
        return result
