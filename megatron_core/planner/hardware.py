"""Performance of a machine: rates of its devices and links, from a data file.

``megatron_core/planner/machines`` contains the files of machines with a name; ``tools/diagnose.py --machine`` measures
this machine and writes such a file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError

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

    def write(self, path: str | Path) -> None:
        """Write a file for ``read_hardware``."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def known_hardware() -> list[str]:
    """Names of the machines included in the library."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def read_hardware(name: str) -> Hardware:
    """Read a machine by name (``h100``) or by path. ``ConfigError`` for an unknown name or an invalid file."""
    path = Path(name) if name.endswith(".json") else MACHINES / f"{name.lower()}.json"
    if not path.is_file():
        raise ConfigError(
            f"hardware={name!r} is not known; legal: {', '.join(known_hardware())}, or a file that "
            "tools/diagnose.py --machine wrote (PATH.json)"
        )
    try:
        return hardware_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ConfigError(
            f"hardware={name!r}: {path} is not a hardware file: {error}; measure the machine again"
        ) from None


def hardware_of(values: dict[str, Any]) -> Hardware:
    """The inverse of ``dataclasses.asdict``; ``TypeError`` for unknown or missing names."""
    links = {end: Link(**values[end]) for end in ("intra", "inter")}
    return Hardware(**(values | links))
