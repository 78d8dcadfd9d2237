"""The section ``progressive_layer_drop``: models that drop layers get the share to keep with each batch."""

from typing import Any

import numpy as np


class ProgressiveLayerDrop:
    """theta(step) = (1 - theta) exp(-gamma step) + theta, from 1 down to ``theta`` (Zhang and He 2020)."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """Return the arguments of the model's forward in training."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}

    def get_theta(self) -> float:
        """Return theta of the step of the last ``update_state``; 1 before."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Set the step."""
        self.current_theta = float((1.0 - self.theta) * np.exp(-self.gamma * global_step) + self.theta)
