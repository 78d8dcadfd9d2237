"""Learning rates that the program and its scheduler set, instead of the engine's own schedule."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_core.any_model.scheduler import needs_argument


class ProgramRates:
    """The scheduler of an ``Engine``: calls the program's scheduler, and keeps the settings of the parameter groups.

    ``groups``: the parameter groups of the engine. ``samples()``: samples of a step, the argument of schedulers whose
    ``step`` needs one, such as Megatron-LM's.
    """

    def __init__(self, groups: list[dict[str, Any]], samples: Callable[[], int]) -> None:
        self.groups, self.samples = groups, samples
        self.scheduler: Any = None
        self.arguments: dict[str, Any] = {}
        """Arguments of the next ``step`` of the scheduler."""
        self.loads_groups = self.loads_scheduler = True
        """Parts that ``load_state_dict`` restores."""

    def step(self) -> None:
        """Called after each update of the weights."""
        if self.scheduler is None:
            return
        if not self.arguments and needs_argument(self.scheduler.step):
            self.scheduler.step(self.samples())
        else:
            self.scheduler.step(**self.arguments)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the groups and the state of the scheduler."""
        settings = [{name: value for name, value in group.items() if name != "params"} for group in self.groups]
        save = getattr(self.scheduler, "state_dict", None)
        return {"groups": settings, "scheduler": save() if callable(save) else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; a state without groups is that of the scheduler alone, from a checkpoint of DeepSpeed."""
        state = state if "groups" in state else {"scheduler": state}
        for group, stored in zip(self.groups, state.get("groups", []), strict=False):
            for name, value in stored.items() if self.loads_groups else ():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
        if self.loads_scheduler and self.scheduler is not None and state.get("scheduler"):
            self.scheduler.load_state_dict(state["scheduler"])
