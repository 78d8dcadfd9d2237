"""Compare your own model, split over ranks, with one process: ``megatron-verify-module model.py:make_model``."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("verify_module")

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron_core.errors import ConfigError
from megatron_core.terminal import parse_flags


@dataclass(frozen=True, kw_only=True)
class ModuleOptions:
    """Train a model for a step per batch in one process and split over ranks, in float64, and compare losses, gradients
    and weights. FILE is run as a Python program.

    Exit status: 0 if they agree, 1 if they differ, 2 for a wrong command line, 130 if interrupted.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE:FUNCTION")]
    """Python file and its function without arguments that returns the model."""
    batches: str = "make_batches"
    """Function of the same file that returns the global batches, one for each step."""
    plan: str | None = None
    """Variable of the same file with the plan of tensor parallelism. Default: the plan of the model, or rules."""
    heads: str | None = None
    """Number of attention heads, or the names of the attributes that hold it, such as "4" or "n_q,n_kv", if parallelize
    does not find them."""
    layout: str = "tp2"
    """Layout of tensor and data parallelism, such as "tp2", "tp2 dp2 zero1"."""


def run_comparison(options: ModuleOptions) -> int:
    """Run the comparison and print its result; return the exit status."""
    from megatron_core.verify import Layout, verify_module  # loads torch, which --help does not need

    file, _, function = options.target.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(f"{options.target!r} must be FILE:FUNCTION, with the path of a Python file; correct it")
    sys.path.insert(0, str(Path(file).parent))
    names = runpy.run_path(file, run_name="verified_module")
    make_model = _function(names, file, function)
    make_batches = _function(names, file, options.batches)
    plan = None
    if options.plan is not None:
        plan = names.get(options.plan)
        if not isinstance(plan, dict):
            raise ConfigError(f"--plan {options.plan}: {file} has no dict of this name; give the name of a variable")
    heads: int | list[str] | None = None
    if options.heads is not None:
        heads = int(options.heads) if options.heads.isdecimal() else options.heads.split(",")
    world_size = Layout.parse(options.layout).world_size
    batches = make_batches()
    layout = options.layout
    report = verify_module(make_model, batches, world_size=world_size, layout=layout, plan=plan, heads=heads)
    for fault in report.faults:
        print(fault)
    if report.agrees:
        print(f"{report.layout} agrees with one process; largest relative error {max(report.errors.values()):.1e}")
    return int(not report.agrees)


def _function(names: dict[str, Any], file: str, name: str) -> Callable[[], Any]:
    function = names.get(name)
    if not callable(function):
        raise ConfigError(f"{file} has no function {name!r}; give the name of one")
    return function


def main() -> int:
    """Parse the flags and run; 1 if the models differ."""
    return run_comparison(parse_flags(ModuleOptions, description=__doc__))
