"""The section ``curriculum_learning``: a difficulty, such as the length of sequences, that grows with the steps."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_core.errors import ConfigError, quoted
from megatron_core.foreign_json import whole

Difficulty = Callable[[int], int]
KEYS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
"""Keys of ``schedule_config`` by ``schedule_type``."""


class CurriculumScheduler:
    """The difficulty of each step; ``ConfigError`` for a section with a missing or wrong key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        kind = config.get("schedule_type")
        if kind not in KEYS:
            raise ConfigError(f"curriculum_learning.schedule_type={quoted(kind)} must be one of {', '.join(KEYS)}")
        self.kind, self.keys = kind, config.get("schedule_config") or {}
        absent = [name for name in ("min_difficulty", "max_difficulty") if not whole(1)(config.get(name))]
        absent += [f"schedule_config.{name}" for name in KEYS[kind] if not self._is_legal(name)]
        if absent:
            raise ConfigError(
                f"curriculum_learning.{absent[0]} must be an integer >= 1, and difficulty a list with one entry more "
                "than the list max_step"
            )
        self.state = {"current_difficulty": config["min_difficulty"]}
        self.custom: Difficulty | None = None

    def _is_legal(self, name: str) -> bool:
        value = self.keys.get(name)
        if self.kind != "fixed_discrete":
            return whole(1)(value)
        lists = [self.keys.get("difficulty"), self.keys.get("max_step")]
        are_lists = all(isinstance(entry, list) and entry and all(map(whole(1), entry)) for entry in lists)
        return are_lists and len(self.keys["difficulty"]) == len(self.keys["max_step"]) + 1

    def set_custom_get_difficulty(self, schedule_function: Difficulty) -> None:
        """Use ``schedule_function(step)`` for the type ``custom``."""
        self.custom = schedule_function

    def get_current_difficulty(self) -> int:
        """Return the difficulty of the last ``update_difficulty``."""
        return int(self.state["current_difficulty"])

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step, counted from 1."""
        if self.kind == "custom":
            if self.custom is None:
                raise ConfigError("curriculum_learning.schedule_type='custom': call set_custom_get_difficulty first")
            return self.custom(global_steps)
        if self.kind == "fixed_discrete":
            bounds = zip(self.keys["difficulty"], [*self.keys["max_step"], math.inf], strict=True)
            return int(next(difficulty for difficulty, last in bounds if global_steps <= last))
        least, most = self.config["min_difficulty"], self.config["max_difficulty"]
        share = (global_steps / self.keys["total_curriculum_step"]) ** (1.0 / self.keys.get("root_degree", 1))
        difficulty = math.floor(share * (most - least) + least)
        multiple = self.keys["difficulty_step"]
        # The first multiple that is not below min_difficulty: 0 would be an empty sequence.
        difficulty = max(difficulty - difficulty % multiple, -(-least // multiple) * multiple)
        return int(min(difficulty, most))

    def update_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step; it stays once the largest one is reached."""
        if self.state["current_difficulty"] < self.config["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()
