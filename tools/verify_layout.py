"""Prove that layouts compute what one process computes: ``verify_layout.py --layouts "tp2 sp" "pp2 v2"``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.verify import GPTExperiment, Layout, fitting_layouts, prove, shrunk
from megatron_core.verify.gpt import configured
from megatron_core.verify.shrink import at_full_size, small_run
from megatron_core.verify.table import TerminalTable, page, summary


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model for a few steps in one process and under each layout, on the same weights and the same global
    batches, and compare loss, gradients, gradient norm and weights.

    All flags of pretrain_gpt.py, and --config FILE, describe the model; it is shrunk unless told otherwise.
    Exit status: 0 if all layouts hold, 1 if one does not, 2 for a wrong command line.
    """

    layouts: tuple[str, ...] = ()
    """Layouts in words: "tp2", "tp2 sp", "pp2 v2", "dp2 zero1 overlap", "tp2 pp2 dp2 sp" (v: chunks on each pipeline
    rank; zero1: sharded optimizer). Default: the layout that the model's flags describe."""
    all: bool = False
    """Every layout of --world-size ranks that fits the model, instead of --layouts."""
    world_size: tuple[int, ...] = ()
    """With --all: sizes of the world, as in --world-size 2 4 8. Alone: ranks of the layout that the flags describe."""
    steps: int = 3
    """Optimizer steps."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """What to compute in. float64 is the proof; in a narrower dtype rounding sets the bounds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu: gloo. cuda: NCCL, a GPU for each rank. auto: cuda where there are GPUs enough."""
    full_size: bool = False
    """Do not shrink the model and its batches."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the table as JSON, too."""
    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the table as a page of Markdown, too."""


def main(options: Options, flags: list[str]) -> int:
    """Prove and print; 0 if all layouts hold."""
    config, layouts = subject(parse_run_config(flags, prog="verify_layout.py"), options)
    device = options.device if options.device != "auto" else available_device(layouts)
    table = TerminalTable([str(layout) for layout in layouts], options.dtype)
    what = describe(config, options, device)
    print(what, table.head(), sep="\n", flush=True)
    proof = prove(
        GPTExperiment(config, options.steps, few_micro_batches=not options.full_size),
        layouts,
        dtype=options.dtype,
        device=device,
        on_row=lambda row: print(*table.lines(row), sep="\n", flush=True),
    )
    print(summary(proof))
    if options.json is not None:
        options.json.write_text(json.dumps(proof.as_dict(), indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text("\n".join(page(proof, what)) + "\n")
    return 0 if proof.holds else 1


def subject(config: RunConfig, options: Options) -> tuple[RunConfig, list[Layout]]:
    """The model under proof and the layouts to prove."""
    if options.all:
        config = sized(config, [Layout()], options)
        layouts = [each for size in options.world_size for each in fitting_layouts(config, size)]
    else:
        layouts = [Layout.parse(text) for text in options.layouts] or [described_layout(config, options)]
        config = sized(config, layouts, options)
    for layout in layouts:
        check(configured(config, layout, options.dtype), layout.world_size)
    if not layouts:
        sizes = ", ".join(map(str, options.world_size)) or "(none)"
        raise ConfigError(f"no layout of --world-size {sizes} fits the model; give sizes such as --world-size 2 4 8")
    return config, layouts


def sized(config: RunConfig, layouts: list[Layout], options: Options) -> RunConfig:
    """The model small, or as it is."""
    return at_full_size(config) if options.full_size else shrunk(config, layouts)


def described_layout(config: RunConfig, options: Options) -> Layout:
    """The layout that the model's own flags ask for."""
    ranks = options.world_size[0] if options.world_size else config.parallel.model_parallel_size
    check(RunConfig.from_flat(config.flat() | small_run()), ranks)
    layout = Layout.of(config.parallel, config.model.num_layers, ranks)
    if layout.world_size == 1:
        raise ConfigError(
            "there is no layout to prove; give --layouts, as in --layouts tp2 'pp2 v2', or --all --world-size 2 4 8, "
            "or the model's own flags, as in --tensor-model-parallel-size 2"
        )
    return layout


def refuse_contradictions(options: Options) -> None:
    """Options that do not go together."""
    if options.all and options.layouts:
        raise ConfigError("--all and --layouts exclude one another; keep one of them")
    if len(options.world_size) > 1 and not options.all:
        raise ConfigError("several --world-size need --all; or say the layouts with --layouts")
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} proves nothing; give 1 or more")


def available_device(layouts: list[Layout]) -> str:
    """cuda where every rank of every layout has a GPU."""
    most = max(layout.world_size for layout in layouts)
    return "cuda" if torch.cuda.device_count() >= most else "cpu"


def describe(config: RunConfig, options: Options, device: str) -> str:
    """What is about to be proved."""
    model = config.model
    size = "as given" if options.full_size else "shrunk"
    return (
        f"model ({size}): {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads"
        f", sequences of {config.data.seq_length}; {options.steps} steps in {options.dtype} on {device}; errors are "
        "relative, and in epsilons of the dtype"
    )


def run(args: list[str] | None = None) -> int:
    """The whole program; an error that users can mend is one message."""
    options, flags = tyro.cli(Options, prog="verify_layout.py", args=args, return_unknown_args=True)
    try:
        refuse_contradictions(options)
        return main(options, flags)
    except MegatronError as error:
        print(f"verify_layout.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
