"""Compare layouts with one process: ``megatron-verify --layouts "tp2 sp" "pp2 v2"``."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("verify_layout")

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_core import verify
from megatron_core.command import program
from megatron_core.config import ParallelConfig, RunConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.features.compilation.settings import CompilationConfig
from megatron_core.output_file import Output, starting_with
from megatron_core.prepared_output import json_with, prepare_output
from megatron_core.terminal import parse_flags
from megatron_core.tokenizers import tokenizer_of
from megatron_core.tokenizers.build import vocabulary_size
from megatron_core.verify import Layout, fitting_layouts, shrunk
from megatron_core.verify.comparison import (
    BITS_HEADING,
    HEADING,
    OF_EVERY_LAYOUT,
    Task,
    changed_values,
    configured,
    layout_task,
    not_compared,
    pairwise,
    require_legal,
    said_of_stages,
)
from megatron_core.verify.shrink import at_full_size, small_run
from megatron_core.verify.together import incomparable

MOST_RANKS = 4096
"""Maximum number of ranks."""
SMALL_WIDTH = 1024
"""Hidden size that the small model exceeds only if a single layout needs it; a step takes seconds then."""
MOST_PROCESSES = 8
"""Maximum number of ranks that are processes without --device cpu."""


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Train a model for a few steps in one process and under each layout, with the same weights and global batches, and
    compare loss, gradients, gradient norm and weights; with --bits their hashes.

    All flags of pretrain_gpt.py (see its --help), and --config FILE, describe the model; it is reduced in size without
    --full-size. Exit status: 0 if all layouts agree, 1 if one does not, 2 for a wrong command line, 130 if interrupted.
    """

    layouts: tuple[str, ...] = ()
    """Layouts such as "tp2", "cp2 sp tp2", "pp2 v2", "dp2 zero1 overlap", "tp2 pp2 dp2 zb_v" (sp: sequence parallel; v:
    chunks on each pipeline rank; zero1: sharded optimizer; or a --pipeline-schedule). Default: the layout of the
    model's flags."""
    all: bool = False
    """Instead of --layouts: every layout of --world-size ranks that fits the model, with 1f1b and interleaved."""
    pairwise: bool = False
    """With --all: check only a sample of the layouts of each world size that contains every pair of sizes and
    switches."""
    world_size: tuple[int, ...] = ()
    """With --all: numbers of ranks, such as 2 4 8. With --layouts: the number of ranks, which determines dp where a
    layout does not give it. Otherwise: ranks of the layout of the flags."""
    steps: int = 3
    """Optimizer steps."""
    bits: bool = False
    """Compare hashes instead of values: every bit of losses, gradients, norms, weights and optimizer state must be that
    of one process. A layout fails with the first step, module and tensor that differ. Add --layout-invariant, without
    which most layouts differ."""
    thorough: bool = False
    """Also compare the optimizer's state and averaged weights, an evaluation, and trainings of 10 steps on token files,
    which go through the shortened schedules: without an interruption, and resumed from a checkpoint of one process
    and by one process from a checkpoint of the layout."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Dtype of all computations; default: float64, which shows every defect, then that of a run with --bf16 or --fp16;
    with --bits float32. In a narrower dtype than float64 the bounds are those of rounding."""
    device: Literal["auto", "cpu", "cuda", "simulated"] = "auto"
    """cpu: a process for each rank, over shared memory, or --distributed-backend gloo. cuda: NCCL, a GPU for each rank.
    simulated: ranks are threads, for large worlds. auto: cuda if there are enough GPUs, else cpu up to 8 ranks,
    else simulated."""
    full_size: bool = False
    """Do not reduce the size of the model and its batches."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table as JSON."""
    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table as a page of Markdown."""

    @property
    def compared_dtype(self) -> str:
        """``dtype`` or its default."""
        return self.dtype or ("float32" if self.bits else "float64")

    def dtypes(self, config: RunConfig) -> list[str]:
        """The dtypes of the comparison, one after the other."""
        own = {"bfloat16": config.training.bf16, "float16": config.training.fp16}
        both = self.dtype is None and not self.bits
        return [self.compared_dtype, *(dtype for dtype, is_own in own.items() if is_own and both)]


def verify_layouts(options: LayoutOptions, flags: list[str], outputs: Mapping[str, Output]) -> int:
    """Compare and print; return 0 if all layouts agree."""
    task = task_of(parse_run_config(flags, prog=program()), options)
    from megatron_core.verify import GPTExperiment  # loads torch, which --help and refused settings do not need
    from megatron_core.verify.compare_layouts import compare_bits, compare_values
    from megatron_core.verify.table import print_wrapped

    device = options.device if options.device != "auto" else available_device(task.layouts)
    if device == "simulated" and task.config.section(CompilationConfig).compile:
        raise ConfigError(
            "compile=True cannot be checked with simulated ranks, whose groups graphs cannot name; give --device cpu, "
            "or remove --compile"
        )
    what = describe_comparison(task.config, options, device)
    print_wrapped(*(f"note: {note}" for note in task.notes), what)
    experiment = GPTExperiment(task.config, options.steps, not options.full_size, task.own_settings)
    if not options.bits:
        experiment = replace(experiment, thorough=options.thorough, plain_reference=True)
    compared = (compare_bits if options.bits else compare_values)(experiment, task, device, what, outputs)
    return 0 if compared else 1


def task_of(config: RunConfig, options: LayoutOptions) -> Task:
    """The model under test and its layouts; ``ConfigError`` if one of them cannot be trained."""
    if options.all:
        task = all_layouts(config, options)
    elif options.layouts:
        layouts = [layout_of(text, options.world_size) for text in options.layouts]
        small = sized(config, layouts, options)
        notes_of_task = tuple(notes_on_comparison(config, layouts, options))
        values = {name: getattr(config.parallel, name) for name in OF_EVERY_LAYOUT}
        changed = {name: value for name, value in values.items() if value != getattr(ParallelConfig(), name)}
        task = Task(small, layouts, changed, notes_of_task)
    else:
        ranks = options.world_size[0] if options.world_size else config.parallel.model_parallel_size
        task = layout_task(config, ranks, full_size_model(config) if options.full_size else None)
    require_legal(task, options.compared_dtype)
    dtypes = options.dtypes(config)
    return replace(
        task,
        dtypes=dtypes,
        not_compared=not_compared(task, config, dtypes[-1]),
        changed=changed_values(task, config, dtypes[-1]),
    )


def layout_of(text: str, world_size: tuple[int, ...]) -> Layout:
    """A layout of --layouts; --world-size determines dp if ``text`` does not."""
    layout = Layout.parse(text)
    if not world_size or layout.world_size == world_size[0]:
        return layout
    if layout.dp > 1 or world_size[0] % layout.world_size:
        raise ConfigError(
            f"layout {text!r} has {layout.world_size} ranks, but --world-size is {world_size[0]}; remove --world-size, "
            "or give a multiple and no dp"
        )
    return replace(layout, dp=world_size[0] // layout.world_size)


def full_size_model(config: RunConfig) -> RunConfig:
    """The model itself, with its own vocabulary."""
    return at_full_size(config, vocabulary_size(config, tokenizer_of(config.data)))


def sized(config: RunConfig, layouts: list[Layout], options: LayoutOptions) -> RunConfig:
    """The small version of the model, or with --full-size the model itself."""
    if options.full_size:
        return full_size_model(config)
    small = shrunk(config, layouts)
    width = small.model.hidden_size
    if width > max(SMALL_WIDTH, *(shrunk(config, [layout]).model.hidden_size for layout in layouts)):
        names = ", ".join(repr(str(layout)) for layout in layouts)
        raise ConfigError(
            f"--layouts are compared with one small model, which would have {small.model.num_attention_heads} heads "
            f"and hidden_size={width} to be legal for all of them; give {names} in separate commands"
        )
    return small


def all_layouts(config: RunConfig, options: LayoutOptions) -> Task:
    """Every layout of --world-size ranks."""
    config = sized(config, [Layout()], options)
    sizes = [fitting_layouts(config, size) for size in options.world_size]
    names = ("layout_invariant", "layout_invariant_parts", "layout_invariant_chunks")
    unequal = RunConfig.from_flat({name: value for name, value in config.flat().items() if name not in names})
    refused = {
        str(layout): next(problems(configured(config, layout, options.compared_dtype), layout.world_size))
        for size, fitting in zip(options.world_size, sizes, strict=True)
        for layout in fitting_layouts(unequal, size)
        if layout not in fitting
    }
    refused |= {
        str(layout): f"it cannot be compared: {reason}"
        for fitting in sizes
        for layout in fitting
        if (reason := incomparable(config, layout)) is not None
    }
    sizes = [[layout for layout in fitting if str(layout) not in refused] for fitting in sizes]
    layouts = [layout for fitting in sizes for layout in (sampled(fitting) if options.pairwise else fitting)]
    if not layouts or max(options.world_size) == 1:
        listed = ", ".join(map(str, options.world_size))
        raise ConfigError(f"no layout of --world-size {listed} fits the model; give sizes such as --world-size 2 4 8")
    return Task(config, layouts, refused=refused)


def sampled(layouts: list[Layout]) -> list[Layout]:
    """A sample of ``layouts`` that contains every pair of values that any two of their fields have."""
    values = [{name: repr(value) for name, value in vars(layout).items()} for layout in layouts]
    sample = pairwise(values, "layouts")
    return [layout for i, layout in enumerate(layouts) if i in sample]


def notes_on_comparison(config: RunConfig, layouts: list[Layout], options: LayoutOptions) -> Iterator[str]:
    """Differences between what is compared and what the flags describe."""
    stages = said_of_stages(config)
    if stages:
        settings = ", ".join(f"{name}={value}" for name, value in stages.items())
        yield f"--layouts determine the stages, so {settings} is ignored; to check it, remove --layouts"
    for layout in layouts if not options.full_size else ():
        as_given = RunConfig.from_flat(config.flat() | small_run() | layout.settings())
        fault = next(problems(as_given, layout.world_size), None)
        if fault:
            yield f"the full-size model cannot be trained in {str(layout)!r} ({fault}); only the small one is compared"


def refuse_contradictions(options: LayoutOptions) -> None:
    """``ConfigError`` for options that contradict each other, and for files that could not be written at the end."""
    if options.all and options.layouts:
        raise ConfigError("--all and --layouts exclude each other; remove one of them")
    if options.all and not options.world_size:
        raise ConfigError("--all needs --world-size, for example --all --world-size 2 4 8")
    if options.pairwise and not options.all:
        raise ConfigError("--pairwise samples the layouts of --all; add --all, or remove it")
    if len(options.world_size) > 1 and not options.all:
        raise ConfigError("several values of --world-size need --all; add it, or give --layouts")
    if any(not 1 <= size <= MOST_RANKS for size in options.world_size):
        raise ConfigError(f"--world-size {' '.join(map(str, options.world_size))}: legal are 1 to {MOST_RANKS}")
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} is too small; give 1 or more")


def prepare_outputs(options: LayoutOptions, flags: list[str]) -> Mapping[str, Output]:
    """Check the files that will be written, before the work starts."""
    heading = BITS_HEADING if options.bits else HEADING
    kinds = {
        "json": json_with("table of this tool", "dtype", "backend", "rows"),
        "markdown": starting_with("page of this tool", heading.encode()),
    }
    return {
        n: prepare_output(options, n, file_check, flags)
        for n, file_check in kinds.items()
        if getattr(options, n) is not None
    }


def available_device(layouts: list[Layout]) -> str:
    """cuda if there is a GPU for every rank of every layout, else cpu for small worlds and simulated for large ones."""
    import torch

    most = max(layout.world_size for layout in layouts)
    if torch.cuda.device_count() >= most:
        return "cuda"
    return "cpu" if most <= MOST_PROCESSES else "simulated"


def describe_comparison(config: RunConfig, options: LayoutOptions, device: str) -> str:
    """The line about what is compared."""
    model = config.model
    size = "full size" if options.full_size else "shrunk"
    steps = f"{options.steps} steps" if options.steps > 1 else "1 step"
    return (
        f"model ({size}): {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads"
        f", sequences of {config.data.seq_length}; {steps} in {options.compared_dtype} on {device}; "
        + ("all bits are compared" if options.bits else "errors are relative, ε is the machine epsilon")
        + ("; of all layouts a sample, in which every pair of sizes and switches occurs" if options.pairwise else "")
    )


def main(args: list[str] | None = None) -> int:
    """The whole program; a user error is printed as one message."""
    options, flags = parse_flags(LayoutOptions, prog=program(), args=args, return_unknown_args=True)
    try:
        refuse_contradictions(options)
        return verify_layouts(options, flags, prepare_outputs(options, flags))
    except verify.RankFailure as error:
        print(f"{program()}: training in one process failed: {error}", file=sys.stderr)
        return 1
    except MegatronError as error:
        print(f"{program()}: {error}", file=sys.stderr)
        return 2
