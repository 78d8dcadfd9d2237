"""Placement of the state of an engine: whole parameters, and state outside of the memory of its device."""

import os
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor, nn

from megatron_core.any_model.agreement import AgreeingDataParallel
from megatron_core.any_model.torch_optimizer import TorchOptimizer
from megatron_core.any_model.whole import WholeTensors
from megatron_core.errors import ConfigError
from megatron_core.features.offload.state import PARTS, OffloadedState
from megatron_core.optimizer.sharded import Optimizer


class EngineOffload:
    """A part of ``Engine``."""

    data_parallel: AgreeingDataParallel
    micro_step: int
    whole: WholeTensors
    _sharded: Optimizer
    _backwards: int
    _offloaded: OffloadedState | None = None

    def offload(self, folder: str | os.PathLike[str] | None = None, *, parts: Collection[str] = PARTS) -> int:
        """Move state to host memory, or to files in ``folder``, until ``reload``; return the freed bytes of this rank.

        ``parts``: those of ``features.offload.state.PARTS``. Without ``weights`` the module can run forward meanwhile.
        Errors: ``ConfigError`` if state is offloaded already, and on a CPU without a folder.
        """
        self._require_state(PARTS)
        moments: list[Tensor] = []
        if isinstance(self._sharded, TorchOptimizer):
            states = self._sharded.caller.state.values()
            moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        self._offloaded = OffloadedState(
            self.data_parallel,
            self._sharded,
            None if folder is None else Path(folder),
            parts,
            keeps_gradients=self.micro_step + self._backwards > 0,
            moments=moments,
        )
        return self._offloaded.nbytes

    def reload(self) -> None:
        """Move the state of ``offload`` back; nothing without it."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _require_state(self, names: Collection[str]) -> None:
        missing = () if self._offloaded is None else sorted(self._offloaded.parts.intersection(names))
        if missing:
            raise ConfigError(f"the engine's {', '.join(missing)} are offloaded; call reload() first (reload_states())")

    def gathered(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, *, modify: bool = False, source: int = 0
    ) -> AbstractContextManager[None]:
        """Return a context in which ``parameters`` are whole, at ZeRO 3 too; all ranks enter it together.

        With ``modify``, the weights of the data-parallel rank ``source`` at its end are kept on all ranks.
        """
        return self.whole.gathered(parameters, modify=modify, source=source)
