"""Find the bottlenecks of a run, with evidence, their share of the time, and fixes ordered by gain.

megatron-diagnose runs/mine

megatron-diagnose --machine --output machine.json

torchrun --nnodes 2 --nproc-per-node 8 -m megatron_core.commands.diagnose --links --hardware machine.json

RUN is the folder of --save, or the file of --metrics-file. Rules and their sources: docs/monitoring.md.
"""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("diagnose")

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import tyro

from megatron_core.errors import ConfigError
from megatron_core.launcher import read_launcher
from megatron_core.output_file import Kind, Output
from megatron_core.planner.explain import readable_bytes, readable_seconds
from megatron_core.planner.hardware import read_hardware
from megatron_core.prepared_output import json_with, prepare_output
from megatron_core.reports.diagnosis_rules import diagnose
from megatron_core.reports.metrics import read_run
from megatron_core.reports.summary import RunSummary
from megatron_core.terminal import parse_flags

if TYPE_CHECKING:
    from megatron_core.parallel import World

MEASURED = Kind(
    "machine that this tool measured", lambda data: b'"source": "' in data and b"megatron-diagnose --" in data
)


@dataclass(frozen=True, kw_only=True)
class DiagnoseFlags:
    """Diagnose a run, or measure this machine."""

    run: tyro.conf.Positional[str | None] = None
    """Folder of --save, or metrics file, of a run."""
    machine: bool = False
    """Instead of a run, measure this machine for the planner: matrix products, memory, collectives by size and group,
    disk."""
    links: bool = False
    """Measure the links within and between hosts, on all ranks that torchrun has started, and write the machine of
    --hardware with them."""
    output: str = "machine.json"
    """With --machine or --links: the file to write, for --hardware of megatron-plan."""
    ranks: int | None = None
    """With --machine: number of ranks; default: one per GPU, without GPUs one per core."""
    disk: str | None = None
    """With --machine: folder whose disk is measured; default: the folder of temporary files."""
    quick: bool = False
    """With --machine: smaller tensors and fewer repetitions."""
    hardware: str | None = None
    """Machine for predictions of other layouts: a name, or a file written by --machine; default: the run's device."""
    json: str | None = None
    """Also write the diagnosis to this file, as JSON."""


def measure_machine(settings: DiagnoseFlags) -> None:
    """Measure, print, and write the planner's file."""
    from megatron_core.verify.machine import describe_machine, measured_machine  # importing torch takes a while

    output = prepare_output(settings, "output", MEASURED)
    hardware, rates, disk = measured_machine(settings.ranks, settings.disk, quick=settings.quick)
    print(describe_machine(hardware, rates, disk))
    output.write(hardware.as_json())
    print(f"wrote {settings.output}; use it with megatron-plan --hardware {settings.output}")


def measure_links(settings: DiagnoseFlags, world: "World") -> None:
    """Measure, print, and write the planner's file on rank 0."""
    from megatron_core.parallel import start_world
    from megatron_core.verify.links import measured_links

    if settings.hardware is None or settings.machine or settings.run is not None:
        raise ConfigError("links needs only the machine of the hosts; give it by --hardware (a name, or a file)")
    machine = read_hardware(settings.hardware)
    output = prepare_output(settings, "output", MEASURED) if world.rank == 0 else None
    start_world(world)
    machine = measured_links(machine, world)
    if output is not None:
        for name, link in (("within a host", machine.intra), ("between hosts", machine.inter)):
            print(f"{name}: {readable_bytes(link.bandwidth)}/s of a rank, latency {readable_seconds(link.latency)}")
        output.write(machine.as_json())
        print(f"wrote {settings.output}; use it with megatron-plan --hardware {settings.output}")


def diagnose_run(settings: DiagnoseFlags) -> None:
    """Read the records and print the diagnosis."""
    if settings.run is None:
        raise ConfigError("there is no run to diagnose; give its folder, or --machine")
    output: Output | None = None
    if settings.json is not None:
        output = prepare_output(settings, "json", json_with("diagnosis", "findings", "notes"))
    machine = None if settings.hardware is None else read_hardware(settings.hardware)
    diagnosis = diagnose(RunSummary.of(read_run(settings.run), machine))
    print(diagnosis.text())
    if output is not None:
        output.write(json.dumps(asdict(diagnosis), indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, diagnose and exit."""
    settings = parse_flags(DiagnoseFlags, args=arguments, description=__doc__)
    if settings.links:
        from megatron_core.parallel import run_job

        read_launcher()
        run_job(lambda world: measure_links(settings, world))
    return status_of(lambda: (measure_machine if settings.machine else diagnose_run)(settings))
