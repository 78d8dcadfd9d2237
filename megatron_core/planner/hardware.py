"""What a machine can do: rates of its devices and of the links between them, from a data file.

``megatron_core/planner/machines`` holds the machines that are known by name; ``tools/diagnose.py --machine`` measures
the one at hand and writes such a file.
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
    """What connects devices: a collective of S bytes on the wire takes ``latency`` + S / ``bandwidth``."""

    bandwidth: float
    """Bytes a second that one device sends, while others do the same (NCCL's bus bandwidth)."""
    latency: float
    """Seconds of a message of no length."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that large operations reach, and what each operation costs besides."""

    name: str
    """As ``--hardware`` calls it."""
    source: str
    """Where the figures come from."""
    memory_bytes: float
    """Of a device, before anything of a run is in it."""
    reserved_bytes: float
    """What context, kernels and communication buffers take of it."""
    devices_per_node: int
    """Devices that ``intra`` connects."""
    product_flops: Mapping[str, float]
    """FLOPs a second of a large matrix product, by the name of a dtype."""
    product_edge: float
    """A product of m x k and k x n runs at 1 / ((1 + e/m) (1 + e/n) (1 + e/k)) of that rate, e being this."""
    attention_efficiency: float
    """Rate of fused attention, over ``product_flops``, of the FLOPs of pairs that are seen."""
    memory_bandwidth: float
    """Bytes a second that operations on elements read and write."""
    launch_seconds: float
    """Least time of an operation."""
    intra: Link
    """Between devices of a node."""
    inter: Link
    """Between a device and those of other nodes."""
    overlap: float
    """Share of a computation's time behind which communication that may overlap disappears."""
    has_host: bool = True
    """Whether the device has memory of its own, so that offloading to the host frees some."""
    host_link: float
    """Bytes a second between a device and its host, one direction."""
    host_memory_bandwidth: float
    """Bytes a second that one device's part of the host's cores reads and writes, for updates there."""
    disk_bandwidth: float = 1e9
    """Bytes a second of files, for optimizer state there."""
    step_seconds: float = 0.0
    """Time of a step besides all that: data, logging, waiting for the slowest."""

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
        """The rate of products of a dtype; ``ConfigError`` if the file has none."""
        rate = self.product_flops.get("bfloat16" if dtype == "float16" else dtype)
        if rate is None:
            raise ConfigError(
                f"hardware {self.name!r} has no rate of products in {dtype}; legal: {', '.join(self.product_flops)}"
            )
        return rate

    @property
    def usable_bytes(self) -> float:
        """Memory that tensors of a run can take."""
        return self.memory_bytes - self.reserved_bytes

    def write(self, path: str | Path) -> None:
        """Write the file that ``read_hardware`` reads."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def known_hardware() -> list[str]:
    """Names of the machines that come with the library."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def read_hardware(name: str) -> Hardware:
    """A machine by name (``h100``), or by the path of its file. ``ConfigError`` for an unknown or a damaged one."""
    path = Path(name) if name.endswith(".json") else MACHINES / f"{name.lower()}.json"
    if not path.is_file():
        raise ConfigError(
            f"hardware={name!r} is not known; legal: {', '.join(known_hardware())}, or a file that "
            "tools/diagnose.py --machine wrote (PATH.json)"
        )
    try:
        return hardware_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ConfigError(f"hardware={name!r}: {path} is no hardware file: {error}; measure it anew") from None


def hardware_of(values: dict[str, Any]) -> Hardware:
    """The inverse of ``dataclasses.asdict``; ``TypeError`` for names that do not belong there or are absent."""
    links = {end: Link(**values[end]) for end in ("intra", "inter")}
    return Hardware(**(values | links))
