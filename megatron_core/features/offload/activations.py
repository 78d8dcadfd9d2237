"""Keep activations in host memory between forward and backward (Rhu et al. 2016; Ren et al. 2021).

The tensors that a unit saves are copied to the host while this unit and the next one compute; after the next unit's
forward their memory on the device is freed, so two units are on the device. When a unit's backward begins, the tensors
of the unit before it start to return. A unit whose backward begins before another unit has run still has its tensors on
the device.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_core.config import RunConfig
from megatron_core.data_parallel.memory import TransferHandle
from megatron_core.features.offload.transfer import empty_on_host, is_on_host, lane
from megatron_core.parallel.handles import Done
from megatron_core.transformer.block import TransformerBlock


class _Saved:
    """A saved tensor in host memory; until it is copied, and from ``load`` to ``take``, it is also on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._returns = False
        self._here: Tensor | None = tensor.detach()
        self._host = empty_on_host(tensor)
        self._transfer: TransferHandle = lane("host copy_out", self._device).copy(self._host, self._here)

    def load(self) -> None:
        """Start to copy the tensor to the device unless it is there."""
        if self._here is None:
            self._returns, self._here = True, torch.empty_like(self._host, device=self._device)
            self._transfer = lane("host copy_in", self._device).copy(self._here, self._host)

    def take(self) -> Tensor:
        """Return the tensor on the device."""
        assert self._here is not None
        tensor = self._here
        if self._returns:
            self.settle()
        return tensor

    def settle(self) -> None:
        """Wait for the transfer and release the tensor on the device."""
        self._transfer.wait()
        self._transfer = Done()
        self._here = None


class _Unit:
    """The tensors that one forward of a unit saves, and the unit before it in the same forward of the model."""

    def __init__(self, before: "_Unit | None") -> None:
        self.before = before
        self.saved: list[ref[_Saved]] = []
        self.moving: list[_Saved] = []
        """Tensors with transfers that may be running: their memory must not be freed."""

    def settle(self) -> None:
        """Wait for the transfers and release the tensors on the device."""
        for saved in self.moving:
            saved.settle()
        self.moving.clear()


def offload_block(config: RunConfig, block: TransformerBlock, device: torch.device) -> str:
    """Offload the activations of the first layers of a stage; see ``Feature.convert_layers``."""
    offload_activations(block)
    return ""


def offload_activations(block: TransformerBlock) -> None:
    """Keep the activations of the first ``cpu_offloading_num_layers`` layers of ``block`` in host memory."""
    if block.model_config.cpu_offloading_num_layers:
        block.run_unit = ActivationOffload(block.model_config.cpu_offloading_num_layers).run


class ActivationOffload:
    """Runs the units of a model such that the first ``count`` of them keep their saved tensors in host memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._latest: _Unit | None = None
        """The last offloaded unit of the current forward."""
        self._active: _Unit | None = None
        """The unit of the current backward."""
        self._moving: list[_Unit] = []

    def run(self, number: int, forward: Callable[[], Any], modules: Iterable[nn.Module]) -> Any:
        """Return ``forward()`` of unit ``number``, which consists of ``modules``; their weights stay on the device."""
        if number >= self._count:
            output = forward()
            if self._latest is not None:
                self._follow(self._latest, output)
            return output
        unit = self._latest = _Unit(self._latest if number else None)
        weights = [p for module in modules for p in module.parameters()]

        def pack(tensor: Tensor) -> Tensor | _Saved:
            # Compare the storages of now: a weight that ZeRO 3 gathers has another one than before and after.
            if is_on_host(tensor) or _storage(tensor) in map(_storage, weights):
                return tensor
            saved = _Saved(tensor)
            unit.saved.append(ref(saved))
            unit.moving.append(saved)
            return saved

        def unpack(packed: Tensor | _Saved) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            self._begin_backward(unit)
            packed.load()
            return packed.take()

        with saved_tensors_hooks(pack, unpack):
            output = forward()
        self._settle_all_but(unit)
        self._moving.append(unit)
        return output

    def _follow(self, unit: _Unit, output: Any) -> None:
        """Let the first unit that is not offloaded free ``unit`` in forward, and load it in backward."""
        self._latest = None
        self._settle_all_but()
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._prefetch(unit))

    def _begin_backward(self, unit: _Unit) -> None:
        if self._active is not unit:
            self._active = unit
            before = [] if unit.before is None else [unit.before]
            self._settle_all_but(unit, *before)
            for used_soon in (unit, *before):
                self._prefetch(used_soon)

    def _prefetch(self, unit: _Unit) -> None:
        """Start to load the tensors of ``unit``, in the order of their use in backward."""
        alive = [saved for reference in reversed(unit.saved) if (saved := reference()) is not None]
        for saved in alive:
            saved.load()
        unit.moving += [saved for saved in alive if saved not in unit.moving]
        if unit not in self._moving:
            self._moving.append(unit)

    def _settle_all_but(self, *needed: _Unit) -> None:
        for unit in self._moving:
            if unit not in needed:
                unit.settle()
        self._moving = [unit for unit in self._moving if unit in needed]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
