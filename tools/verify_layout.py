"""Prove that layouts compute what one process computes: ``verify_layout.py --layouts "tp2 sp" "pp2 v2"``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.config.parallel import BALANCED_STAGES
from megatron_core.config.validate import check, problems
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.verify import GPTExperiment, Layout, RankFailure, fitting_layouts, prove, shrunk
from megatron_core.verify.gpt import configured
from megatron_core.verify.shrink import at_full_size, small_run
from megatron_core.verify.table import TerminalTable, page, summary


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model for a few steps in one process and under each layout, on the same weights and the same global
    batches, and compare loss, gradients, gradient norm and weights.

    All flags of pretrain_gpt.py (see its --help), and --config FILE, describe the model; it is shrunk unless told
    otherwise.
    Exit status: 0 if all layouts hold, 1 if one does not, 2 for a wrong command line, 130 if interrupted.
    """

    layouts: tuple[str, ...] = ()
    """Layouts in words: "tp2", "tp2 sp", "pp2 v2", "dp2 zero1 overlap", "tp2 pp2 dp2 zb_v" (v: chunks on each pipeline
    rank; zero1: sharded optimizer; also the names of --pipeline-schedule). Default: the layout that the model's flags
    describe."""
    all: bool = False
    """Every layout of --world-size ranks that fits the model, with 1f1b and interleaved, instead of --layouts."""
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


@dataclass(frozen=True)
class Task:
    """What is to be proved."""

    config: RunConfig
    layouts: list[Layout]
    own_settings: dict[str, object] = field(default_factory=dict)
    """Settings of the model's own flags that no word of a layout says."""
    notes: tuple[str, ...] = ()


def main(options: Options, flags: list[str]) -> int:
    """Prove and print; 0 if all layouts hold."""
    task = task_of(parse_run_config(flags, prog="verify_layout.py"), options)
    device = options.device if options.device != "auto" else available_device(task.layouts)
    table = TerminalTable([str(layout) for layout in task.layouts], options.dtype)
    what = describe(task.config, options, device)
    print(*(f"note: {note}" for note in task.notes), what, table.head(), sep="\n", flush=True)
    proof = prove(
        GPTExperiment(task.config, options.steps, not options.full_size, task.own_settings),
        task.layouts,
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


def task_of(config: RunConfig, options: Options) -> Task:
    """The model under proof and its layouts; an error if one of them cannot be trained."""
    if options.all:
        task = all_layouts(config, options)
    elif options.layouts:
        layouts = [Layout.parse(text) for text in options.layouts]
        task = Task(sized(config, layouts, options), layouts, notes=tuple(notes(config, layouts, options)))
    else:
        task = described(config, options)
    for layout in task.layouts:
        found = list(problems(configured(task.config, layout, options.dtype, task.own_settings), layout.world_size))
        if found:
            raise ConfigError(f"layout {str(layout)!r} cannot be trained: {'; '.join(found)}")
    return task


def sized(config: RunConfig, layouts: list[Layout], options: Options, *, keep_layers: bool = False) -> RunConfig:
    """The model small, or as it is."""
    return at_full_size(config) if options.full_size else shrunk(config, layouts, keep_layers=keep_layers)


def all_layouts(config: RunConfig, options: Options) -> Task:
    """Every layout of the worlds that were asked for."""
    config = sized(config, [Layout()], options)
    layouts = [each for size in options.world_size for each in fitting_layouts(config, size)]
    if not layouts or max(options.world_size) == 1:
        sizes = ", ".join(map(str, options.world_size))
        raise ConfigError(f"no layout of --world-size {sizes} fits the model; give sizes such as --world-size 2 4 8")
    return Task(config, layouts)


def notes(config: RunConfig, layouts: list[Layout], options: Options) -> Iterator[str]:
    """Where what is proved is not what the flags say."""
    own = said_of_stages(config)
    if own:
        said = ", ".join(f"{name}={value}" for name, value in own.items())
        yield f"--layouts say what is on which stage, so that {said} is left out; to prove it, leave --layouts out"
    if config.training.fp16:
        yield f"fp16 is left out: what is computed in is --dtype {options.dtype}"
    for layout in layouts if not options.full_size else ():
        as_given = RunConfig.from_flat(config.flat() | small_run() | layout.settings())
        found = next(problems(as_given, layout.world_size), None)
        if found:
            yield f"the model as given cannot be trained in {str(layout)!r} ({found}); proved is the small one"


def said_of_stages(config: RunConfig) -> dict[str, object]:
    """Settings of the pipeline's stages, and their plan, that are not the usual ones."""
    usual = BALANCED_STAGES | {"pipeline_plan": None}
    chunks = {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"}  # a layout has those
    values = {name: getattr(config.parallel, name) for name in usual if name not in chunks}
    return {name: value for name, value in values.items() if value != usual[name]}


def described(config: RunConfig, options: Options) -> Task:
    """The layout that the model's own flags ask for."""
    ranks = options.world_size[0] if options.world_size else config.parallel.model_parallel_size
    check(RunConfig.from_flat(config.flat() | small_run()), ranks)
    layout, own = Layout.of(config.parallel, config.model.num_layers, ranks), said_of_stages(config)
    if layout.world_size == 1:
        raise ConfigError(
            "there is no layout to prove; give --layouts, as in --layouts tp2 'pp2 v2', or --all --world-size 2 4 8, "
            "or the model's own flags, as in --tensor-model-parallel-size 2"
        )
    if "pipeline_plan" in own and not options.full_size:
        raise ConfigError("a pipeline_plan has the run's own number of micro-batches; add --full-size to prove it")
    # A layout's one word ``overlap`` stands for both, and its chunks for stages of equal cost.
    exact = ("overlap_grad_reduce", "overlap_param_gather", "num_virtual_stages_per_pipeline_rank")
    settings = own | {name: getattr(config.parallel, name) for name in exact if own or name.startswith("overlap")}
    return Task(sized(config, [layout], options, keep_layers=bool(own)), [layout], settings)


def refuse_contradictions(options: Options) -> None:
    """Options that do not go together, and files that could not be written when the proof is done."""
    if options.all and options.layouts:
        raise ConfigError("--all and --layouts exclude one another; keep one of them")
    if options.all and not options.world_size:
        raise ConfigError("--all needs --world-size, as in --all --world-size 2 4 8")
    if options.layouts and options.world_size:
        raise ConfigError("--layouts say how many ranks there are; leave --world-size out")
    if len(options.world_size) > 1 and not options.all:
        raise ConfigError("several --world-size need --all; or say the layouts with --layouts")
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} proves nothing; give 1 or more")
    for path in (options.json, options.markdown):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{path} cannot be written: give a file in a folder that is there")


def available_device(layouts: list[Layout]) -> str:
    """cuda where every rank of every layout has a GPU."""
    most = max(layout.world_size for layout in layouts)
    return "cuda" if torch.cuda.device_count() >= most else "cpu"


def describe(config: RunConfig, options: Options, device: str) -> str:
    """What is about to be proved."""
    model = config.model
    size = "as given" if options.full_size else "shrunk"
    steps = f"{options.steps} steps" if options.steps > 1 else "1 step"
    return (
        f"model ({size}): {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads"
        f", sequences of {config.data.seq_length}; {steps} in {options.dtype} on {device}; errors are relative, and in "
        "epsilons of the dtype"
    )


def run(args: list[str] | None = None) -> int:
    """The whole program; an error that users can mend is one message."""
    options, flags = tyro.cli(Options, prog="verify_layout.py", args=args, return_unknown_args=True)
    try:
        refuse_contradictions(options)
        return main(options, flags)
    except KeyboardInterrupt:
        print("verify_layout.py: interrupted", file=sys.stderr)
        return 130
    except RankFailure as error:
        print(f"verify_layout.py: one process cannot train this model: {error}", file=sys.stderr)
        return 1
    except MegatronError as error:
        print(f"verify_layout.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
