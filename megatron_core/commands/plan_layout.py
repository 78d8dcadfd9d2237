"""Find the fastest layouts of a model on N devices, and explain them.

megatron-plan --model-preset llama3-8b --bf16 --global-batch-size 512 --gpus 64 --hardware h100

megatron-plan --config run.yaml --gpus 64 --hardware h100 --why-not "tp8 pp2 mbs2"

All settings of pretrain_gpt.py can be added; the planner replaces the settings of the layout.
"""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("plan_layout")

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Annotated

import tyro

from megatron_core.command import program
from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.config.file import names_in
from megatron_core.config.flags import grouped, plain
from megatron_core.errors import ConfigError
from megatron_core.output_file import Output
from megatron_core.planner.cost import LayerTimes, Pipeline
from megatron_core.planner.explain import (
    MemoryOverStep,
    details,
    layout_table,
    objection,
    parse_words,
    readable_seconds,
    start_command,
    whole_training,
    why_slower,
)
from megatron_core.planner.footprint import Footprint
from megatron_core.planner.hardware import Hardware, read_hardware
from megatron_core.planner.layer_time import LayerClock
from megatron_core.planner.layout_settings import describe_layout
from megatron_core.planner.search import Candidate, Search
from megatron_core.prepared_output import json_with, picture_kind, prepare_output
from megatron_core.terminal import exact, parse_flags

LONGEST = 86_400.0
"""Maximum of --time-limit."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Find the fastest layouts of a model on N devices, and explain them."""

    gpus: int
    """Number of devices."""
    hardware: str = "h100"
    """Name of a machine (a100, h100, h100-500w, h200, b200), or a file written by megatron-diagnose --machine."""
    price_per_hour: float | None = None
    """Price of a device for an hour; prints the price of a million tokens, and that of the training if its length is
    known."""
    top: int = 10
    """Number of layouts to print."""
    time_limit: float = 30.0
    """Seconds of the search; then it prints the best layouts so far, and that it has stopped early."""
    objection: Annotated[str | None, tyro.conf.arg(name="why-not")] = None
    """A layout such as "tp8 pp2 mbs2 full-recompute": explain why it is not among the best."""
    explain_memory: bool = False
    """Draw memory by kind over a step, for the layout of --why-not or else for the best one."""
    png: str | None = None
    """With --explain-memory: also write the picture to this file."""
    json: str | None = None
    """Write the layouts to this file, or to standard output with -."""


def plan(settings: PlanFlags, arguments: Sequence[str]) -> None:
    """Search, and print the requested results."""
    hardware = read_hardware(settings.hardware)
    base, arguments, dtype = in_dtype(list(arguments), hardware)
    if settings.png is not None and not settings.explain_memory:
        raise ConfigError(f"png={settings.png!r} has no effect without explain_memory; add --explain-memory")
    if settings.price_per_hour is not None and not 0.0 <= settings.price_per_hour < 1e9:
        raise ConfigError(f"price_per_hour={settings.price_per_hour:g} is out of range; legal: 0 or more")
    if not 1.0 <= settings.time_limit <= LONGEST:
        raise ConfigError(f"time_limit={settings.time_limit:g} is out of range; legal: 1 to {LONGEST:g} seconds")
    if settings.top < 1:
        raise ConfigError(f"top={settings.top} is out of range; legal: 1, 2, 3, ...")
    output: Output | None = None
    if settings.json not in (None, "-"):
        output = prepare_output(
            settings, "json", json_with("list of layouts", "layout", "bytes_by_kind"), arguments, base.flat()
        )
    if settings.png is not None:
        prepare_output(settings, "png", picture_kind(settings.png), arguments, base.flat())
    messages = sys.stderr if settings.json == "-" else sys.stdout
    print(dtype, file=messages, flush=True)
    search = Search(
        base, settings.gpus, hardware, vocabulary(base), progress=show_progress, seconds=settings.time_limit
    )
    began = monotonic()
    candidates = search.best(settings.top)
    if sys.stderr.isatty():
        print("\r" + " " * 78 + "\r", end="", file=exact(sys.stderr))
    if search.stopped:
        print(stopped_early(search), file=messages)
    if settings.json is not None:
        text = layouts_as_json(candidates, search)
        if output is None:
            print(text)
        else:
            output.write(text + "\n")
    if settings.json == "-":
        return
    print(
        f"{search.points:,} layouts, {search.evaluated:,} evaluated in detail, {search.too_large:,} of them too large, "
        f"in {monotonic() - began:.1f} s\n"
    )
    print(layout_table(candidates, settings.gpus))
    print(f"\n1: {describe_layout(candidates[0].config, settings.gpus)}\n{details(candidates[0])}")
    if training := whole_training(candidates[0], settings.gpus, settings.price_per_hour):
        print(training)
    for number, candidate in enumerate(candidates[1:], 2):
        print(f"{number}: {why_slower(candidate, candidates[0])}")
    print()
    for number, candidate in enumerate(candidates, 1):
        line = start_command(candidate.config, base, arguments, settings.gpus, hardware.devices_per_node)
        print(f"{number}: {line}")
    explained = candidates[0]
    if settings.objection is not None:
        print(f"\nwhy not {settings.objection}\n{objection(search, settings.objection, candidates[0])}")
        explained = min(search.candidate(c) for c in parse_words(base, settings.objection, settings.gpus))
    if settings.explain_memory:
        explain_memory(search, explained, settings.png)


def in_dtype(arguments: list[str], hardware: Hardware) -> tuple[RunConfig, list[str], str]:
    """The configuration of ``arguments``, all flags of its commands, and a line about its dtype.

    Without a dtype in the flags and in --config it is bfloat16, if products are faster in it.
    """
    config = parse_run_config(arguments, prog=program())
    dtype = config.training.compute_dtype
    rates = hardware.product_flops
    if dtype != "float32":
        return config, arguments, f"dtype: {dtype}"
    names: set[str] = set()
    for flag, values in grouped(arguments):
        names |= names_in(values[-1]) if plain(flag) == "config" and values else {plain(flag)}
    if names & {"no_bf16", "no_fp16"}:
        return config, arguments, "dtype: float32, as given"
    if rates.get("bfloat16", 0.0) <= rates["float32"]:
        return config, arguments, f"dtype: float32, because products in 16 bits are not faster on {hardware.name}"
    arguments = [*arguments, "--bf16"]
    line = f"dtype: bfloat16, the default on {hardware.name}; the commands have --bf16; for float32 give --no-bf16"
    return parse_run_config(arguments, prog=program()), arguments, line


def stopped_early(search: Search) -> str:
    """A line about the layouts that a search with too little time has not decided."""
    undecided = (
        f"no other takes less than {readable_seconds(search.bound)}" if search.bound else "others were not listed"
    )
    return (
        f"stopped early after {search.seconds:g} s: {search.decided:,} of {search.points:,} layouts were decided, and "
        f"{undecided}; --time-limit N searches for N seconds"
    )


def explain_memory(search: Search, candidate: Candidate, png: str | None) -> None:
    """Print memory by kind over a step."""
    clock = LayerClock(candidate.config, search.hardware, search.devices, search.vocab_size)
    pipeline = Pipeline(candidate.config, search.devices, clock, LayerTimes(clock))
    memory = Footprint.of(
        candidate.config, search.devices, pipeline.plan, pipeline.layers, pipeline.units, search.vocab_size
    )
    over = MemoryOverStep.of(pipeline, memory, candidate.rank)
    layout = describe_layout(candidate.config, search.devices)
    some = pipeline.plan.num_microbatches
    shortened = f", the first {some} of {pipeline.micros} micro-batches" if some < pipeline.micros else ""
    title = f"memory of pipeline rank {candidate.rank} over a step{shortened}: {layout}"
    print(f"\n{title}\n{over.picture(search.hardware.usable_bytes)}")
    if png is not None:
        from megatron_core.reports.plot import plot_memory  # importing matplotlib takes a while

        plot_memory(over.times, over.kinds, search.hardware.usable_bytes, png, title=title)
        print(f"wrote {png}")


def vocabulary(config: RunConfig) -> int:
    """The vocabulary size, as in a dry run."""
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    from megatron_core.tokenizers.build import vocabulary_or_assumed  # importing tokenizers takes a while

    return vocabulary_or_assumed(config)


def layouts_as_json(candidates: Sequence[Candidate], search: Search) -> str:
    """The layouts with all figures; ``complete``: whether no other layout is faster."""
    rows = [
        {
            "layout": describe_layout(candidate.config, search.devices),
            "dtype": candidate.config.training.compute_dtype,
            "complete": not search.stopped,
            "seconds": candidate.seconds,
            "tokens_per_second_per_device": candidate.cost.tokens_per_second,
            "flops_per_second_per_device": candidate.cost.flops_per_second,
            "bubble": candidate.cost.bubble,
            "seconds_by_kind": candidate.cost.by_kind,
            "bytes_by_kind": candidate.memory,
            "bytes_on_host": candidate.on_host,
        }
        for candidate in candidates
    ]
    return json.dumps(rows, indent=2)


def show_progress(decided: int, total: int, best: float) -> None:
    """Show progress in a line that is overwritten, on a terminal."""
    if sys.stderr.isatty():
        so_far = f", best so far {best:.3g} s" if best else ""
        print(f"\r{decided:,} of {total:,} layouts decided{so_far}", end="", file=exact(sys.stderr), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, plan and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    settings, flags_of_run = parse_flags(PlanFlags, args=words, description=__doc__, return_unknown_args=True)
    return status_of(lambda: plan(settings, flags_of_run))
