"""Groups of communicating ranks: sizes, ranks per node, and times of collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2, prod

from megatron_core.config.parallel import ParallelConfig
from megatron_core.planner.hardware import Hardware


@dataclass(frozen=True)
class GroupBandwidth:
    """A group of ranks on a machine."""

    size: int
    local: int
    """Number of ranks of the group on one node."""
    bandwidth: float
    """Bytes per second sent by a rank in a ring of all ranks."""
    latency: float
    inter_bandwidth: float
    """Bytes per second from a rank to other nodes."""

    @classmethod
    def of(cls, hardware: Hardware, size: int, stride: int) -> GroupBandwidth:
        """A group of ranks at a distance of ``stride``. Its members on a node use all their links to other nodes."""
        local = min(size, max(hardware.devices_per_node // stride, 1))
        if local == size:
            return cls(size, size, hardware.intra.bandwidth, hardware.intra.latency, hardware.intra.bandwidth)
        rails = hardware.inter.bandwidth * local
        bandwidth = min(hardware.intra.bandwidth, rails) if local > 1 else rails
        return cls(size, local, bandwidth, hardware.inter.latency, hardware.inter.bandwidth)

    @property
    def steps(self) -> int:
        """Number of sequential messages of a tree algorithm across nodes."""
        return ceil(log2(self.size)) if self.size > 1 else 0

    def gather(self, size: float) -> float:
        """Seconds of an all-gather or reduce-scatter of ``size`` bytes over g ranks: a rank sends (g-1)/g of them."""
        return self._time((self.size - 1) / self.size * size) if self.size > 1 else 0.0

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather(size)

    def all_to_all(self, size: float) -> float:
        """Seconds of an all-to-all with ``size`` bytes per rank: bytes to other nodes use only the rank's own link."""
        if self.size == 1:
            return 0.0
        within = size * (self.local - 1) / self.size / self.bandwidth
        across = size * (self.size - self.local) / self.size / self.inter_bandwidth
        return max(within, across) + self.latency * self.steps

    def send(self, size: float) -> float:
        """Seconds of a message to a neighbour, over the link between nodes if the group spans nodes."""
        return 0.0 if self.size == 1 else self.latency + size / self.inter_bandwidth

    def _time(self, sent: float) -> float:
        return sent / self.bandwidth + self.latency * self.steps


@dataclass(frozen=True)
class Rings:
    """The groups of a layout."""

    hardware: Hardware
    parallel: ParallelConfig
    world_size: int
    _found: dict[tuple[str, ...], GroupBandwidth] = field(default_factory=dict, repr=False, compare=False)

    def ring(self, *axes: str) -> GroupBandwidth:
        """The group over adjacent axes: ``tp``, ``cp``, ``dp``, ``pp``, or ``etp``, ``ep``, ``edp``."""
        if axes not in self._found:
            self._found[axes] = self._make(axes)
        return self._found[axes]

    def _make(self, axes: tuple[str, ...]) -> GroupBandwidth:
        sizes = self._sizes(experts=any(axis in ("etp", "ep", "edp") for axis in axes))
        order = list(sizes)
        stride = prod(sizes[axis] for axis in order[: min(order.index(axis) for axis in axes)])
        return GroupBandwidth.of(self.hardware, prod(sizes[axis] for axis in axes), stride)

    def _sizes(self, *, experts: bool) -> dict[str, int]:
        """Sizes of the axes in the order of the rank number, fastest-varying axis first."""
        parallel, order = self.parallel, self.parallel.rank_order.split("-")
        tp, cp, pp = (
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        if not experts:
            sizes = {"tp": tp, "cp": cp, "dp": self.world_size // (tp * cp * pp), "pp": pp}
            return {axis: sizes[axis] for axis in order if axis in sizes}
        ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_size
        edp = self.world_size // (ep * etp * pp)
        names = {"tp": ("etp", etp), "ep": ("ep", ep), "dp": ("edp", edp), "pp": ("pp", pp)}
        return dict(names[axis] for axis in order if axis in names)
