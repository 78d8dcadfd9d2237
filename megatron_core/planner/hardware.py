"""Performance of a machine: rates of its devices and links, from a data file, and times of collectives in its groups.

``megatron_core/planner/machines`` contains the files of machines with a name; ``megatron-diagnose --machine`` measures
this machine and writes such a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import ceil, log2, prod
from pathlib import Path
from typing import Any

from megatron_core.config.parallel import ParallelConfig
from megatron_core.errors import ConfigError
from megatron_core.foreign_json import COUNT, NUMBER, OBJECT, POSITIVE, STRING, SWITCH, KeyType, mapping, read_object

MACHINES = Path(__file__).with_name("machines")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Connection between devices: a collective with S bytes on the wire takes ``latency`` + S / ``bandwidth``."""

    bandwidth: float
    """Bytes per second sent by one device while all others send, too (NCCL's bus bandwidth)."""
    latency: float
    """Seconds of an empty message."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of large operations, and fixed costs of each operation."""

    name: str
    """Name of the machine for ``--hardware``."""
    source: str
    """Source of the figures."""
    memory_bytes: float
    """Total memory of a device."""
    reserved_bytes: float
    """Memory of a device used by the context, kernels and communication buffers."""
    devices_per_node: int
    """Number of devices connected by ``intra``."""
    product_flops: Mapping[str, float]
    """FLOPs per second of a large matrix product, by name of the dtype."""
    product_edge: float
    """The constant e: a product of m x k and k x n runs at 1 / ((1 + e/m) (1 + e/n) (1 + e/k)) of that rate."""
    attention_efficiency: float
    """Rate of fused attention, for the FLOPs of visible pairs only, divided by ``product_flops``."""
    memory_bandwidth: float
    """Bytes per second read and written by elementwise operations."""
    launch_seconds: float
    """Minimal time of an operation."""
    intra: Link
    """Link between devices of a node."""
    inter: Link
    """Link between a device and devices of other nodes."""
    overlap: float
    """Share of a computation's time that can overlap with communication."""
    has_host: bool = True
    """Whether the device has its own memory, so that offloading to the host frees memory."""
    host_link: float
    """Bytes per second between a device and its host in one direction."""
    host_memory_bandwidth: float
    """Bytes per second read and written by one device's share of the host's cores, for updates on the host."""
    disk_bandwidth: float = 1e9
    """Bytes per second of file reads and writes, for optimizer state on disk."""
    step_seconds: float = 0.0
    """Fixed time of a step: data, logging, waiting for the slowest rank."""

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "has_host"}
        numbers = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        numbers |= {f"product_flops of {dtype}": rate for dtype, rate in self.product_flops.items()}
        for end in ("intra", "inter"):
            numbers |= {f"{end}.{name}": value for name, value in asdict(getattr(self, end)).items()}
        may_be_zero = {"reserved_bytes", "product_edge", "overlap", "step_seconds", "launch_seconds"}
        for name, value in numbers.items():
            if value < 0 or (value == 0 and name not in may_be_zero and not name.endswith("latency")):
                raise ConfigError(f"hardware {self.name!r}: {name}={value} must be above 0")

    def flops(self, dtype: str) -> float:
        """FLOPs per second of matrix products in a dtype; ``ConfigError`` if the file has no such rate."""
        rate = self.product_flops.get("bfloat16" if dtype == "float16" else dtype)
        if rate is None:
            raise ConfigError(
                f"hardware {self.name!r} has no rate of products in {dtype}; legal: {', '.join(self.product_flops)}"
            )
        return rate

    @property
    def usable_bytes(self) -> float:
        """Memory available for the tensors of a run."""
        return self.memory_bytes - self.reserved_bytes

    def as_json(self) -> str:
        """The content of a file for ``read_hardware``."""
        return json.dumps(asdict(self), indent=2) + "\n"


RATES = KeyType("an object of numbers above 0", lambda value: mapping(POSITIVE.accepts)(value) and bool(value))
_OF_FIELDS = {
    "float": NUMBER,
    "int": COUNT,
    "bool": SWITCH,
    "str": STRING,
    "Link": OBJECT,
    "Mapping[str, float]": RATES,
}
TYPES = {f.name: _OF_FIELDS[str(f.type)] for section in (Hardware, Link) for f in fields(section)}
"""Types of the keys of a file."""
REMEDY = "measure the machine again with megatron-diagnose --machine"


def number_size(dtype: str) -> int:
    """Bytes per element of a dtype."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def known_hardware() -> list[str]:
    """Names of the machines included in the library."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def read_hardware(name: str) -> Hardware:
    """Read a machine by name (``h100``) or by path. ``ConfigError`` for an unknown name or an invalid file."""
    path = Path(name) if name.endswith(".json") else MACHINES / f"{name.lower()}.json"
    if not path.is_file():
        raise ConfigError(
            f"hardware={name!r} is not known; legal: {', '.join(known_hardware())}, or a file that "
            "megatron-diagnose --machine wrote (PATH.json)"
        )
    values = read_object(path, ConfigError, REMEDY, TYPES)
    try:
        return hardware_of(values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"hardware={name!r}: {path} is not a hardware file: {error}; {REMEDY}") from None


def hardware_of(values: dict[str, Any]) -> Hardware:
    """The inverse of ``dataclasses.asdict``; ``TypeError`` for unknown or missing names."""
    links = {end: Link(**values[end]) for end in ("intra", "inter")}
    return Hardware(**(values | links))


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
        sent = (self.size - 1) / self.size * size
        return sent / self.bandwidth + self.latency * self.steps if self.size > 1 else 0.0

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
        # An axis of size 1 may be anywhere in the order.
        first = min((order.index(axis) for axis in axes if sizes[axis] > 1), default=0)
        stride = prod(sizes[axis] for axis in order[:first])
        return GroupBandwidth.of(self.hardware, prod(sizes[axis] for axis in axes), stride)

    def _sizes(self, *, experts: bool) -> dict[str, int]:
        """Sizes of the axes in the order of the rank number, fastest-varying axis first."""
        parallel = self.parallel
        order = self.parallel.rank_order.split("-")
        tp = parallel.tensor_model_parallel_size
        cp = parallel.context_parallel_size
        pp = parallel.pipeline_model_parallel_size
        if not experts:
            sizes = {"tp": tp, "cp": cp, "dp": self.world_size // (tp * cp * pp), "pp": pp}
            return {axis: sizes[axis] for axis in order if axis in sizes}
        ep = parallel.expert_model_parallel_size
        etp = parallel.expert_tensor_size
        edp = self.world_size // (ep * etp * pp)
        names = {"tp": ("etp", etp), "ep": ("ep", ep), "dp": ("edp", edp), "pp": ("pp", pp)}
        return dict(names[axis] for axis in order if axis in names)
