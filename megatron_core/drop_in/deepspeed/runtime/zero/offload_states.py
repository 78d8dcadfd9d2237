"""Moves the state of an engine out of its device."""

from collections.abc import Container

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils.logging import log_dist
from megatron_core.any_model import Engine

STATES = {
    OffloadStateTypeEnum.lp_params: "weights",
    OffloadStateTypeEnum.hp_params: "main_weights",
    OffloadStateTypeEnum.optim_states: "moments",
    OffloadStateTypeEnum.lp_grads: "gradients",
    OffloadStateTypeEnum.contiguous_grad_buffer: "gradients",
}


class StatePlacement:
    """``offload_states`` and ``reload_states`` of ``DeepSpeedEngine`` and, as OpenRLHF calls them, of its optimizer."""

    core: Engine

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state (default: all) from a GPU to pinned memory of the host until ``reload_states``, blocking.

        On a CPU the state stays where it is, and one line says so. Errors: ``ValueError`` for another ``device``.
        """
        if device != OffloadDeviceEnum.cpu:
            raise ValueError(f"offload_states: device={device!r} must be 'cpu'; for nvme use offload_optimizer")
        if self.core.world.device.type == "cpu":
            log_dist("offload_states has no effect on a CPU: the state is in host memory", ranks=[0])
            return
        self.core.offload(parts=[name for state, name in STATES.items() if include is None or state in include])

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state of ``offload_states`` back."""
        self.core.reload()
