"""Records the experts chosen by each layer, and repeats the choice.

With ``moe_enable_routing_replay`` each layer of experts of a ``GPTModel`` has a ``RouterReplay``, in the order of the
layers.
"""

from enum import Enum
from typing import ClassVar

from torch import Tensor

from megatron_core.errors import LayoutError


class RouterReplayAction(Enum):
    """A router's action on its choice."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"
    """Repeat the choices of forward passes, in order, for recomputed layers."""


class RouterReplay:
    """The choices ``[T, k]`` of one layer; class methods apply to all layers of this process."""

    global_router_replay_instances: ClassVar[list["RouterReplay"]] = []

    def __init__(self) -> None:
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[Tensor] = []
        RouterReplay.global_router_replay_instances.append(self)

    def replayed(self, chosen: Tensor) -> Tensor:
        """Return the experts to use, given the choice of the router; LayoutError if no stored choice fits."""
        action = self.router_replay_action
        if action is None:
            return chosen
        if action == RouterReplayAction.RECORD:
            self.record_indices(chosen)
            return chosen
        if action == RouterReplayAction.REPLAY_BACKWARD:
            target = self.replay_backward_list.pop(0) if self.replay_backward_list else None
        else:
            target = self.target_topk_idx
        if target is None or target.shape != chosen.shape:
            have = "nothing" if target is None else str(list(target.shape))
            raise LayoutError(f"router replay: the choice must have shape {list(chosen.shape)}, but {have} was given")
        if action == RouterReplayAction.REPLAY_FORWARD:
            self.replay_backward_list.append(target)
        return target.to(chosen.device)

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the choice that REPLAY_FORWARD repeats."""
        self.target_topk_idx = topk_indices
        self.replay_backward_list = []

    def get_recorded_indices(self) -> Tensor | None:
        """Return the choice recorded by RECORD."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: Tensor) -> None:
        """Store a choice."""
        self.recorded_topk_idx = topk_indices

    def clear_indices(self) -> None:
        """Remove all choices."""
        self.target_topk_idx = self.recorded_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set the action of the next calls."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Neither record nor repeat."""
        self.router_replay_action = None

    @classmethod
    def set_replay_data(cls, all_layers_topk_indices: list[Tensor]) -> None:
        """Call ``set_target_indices`` of every layer, in order; LayoutError for another number of layers."""
        layers = cls.global_router_replay_instances
        if len(all_layers_topk_indices) != len(layers):
            raise LayoutError(
                f"{len(all_layers_topk_indices)} choices for {len(layers)} layers of experts; give one for each layer"
            )
        for layer, indices in zip(layers, all_layers_topk_indices, strict=True):
            layer.set_target_indices(indices)

    @classmethod
    def get_recorded_data(cls) -> list[Tensor | None]:
        """Return the recorded choice of every layer."""
        return [layer.get_recorded_indices() for layer in cls.global_router_replay_instances]

    @classmethod
    def clear_global_indices(cls) -> None:
        """Call ``clear_indices`` of every layer."""
        for layer in cls.global_router_replay_instances:
            layer.clear_indices()

    @classmethod
    def set_global_router_replay_action(cls, router_replay_action: RouterReplayAction) -> None:
        """Call ``set_router_replay_action`` of every layer."""
        for layer in cls.global_router_replay_instances:
            layer.set_router_replay_action(router_replay_action)

    @classmethod
    def clear_global_router_replay_action(cls) -> None:
        """Call ``clear_router_replay_action`` of every layer."""
        for layer in cls.global_router_replay_instances:
            layer.clear_router_replay_action()

    @classmethod
    def clear_global_router_replay_instances(cls) -> None:
        """Remove all layers, before another model is built."""
        cls.global_router_replay_instances.clear()
