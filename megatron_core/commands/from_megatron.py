"""Read a launch script of Megatron-LM, and print its settings here, differences, memory and time.

megatron-from-megatron --output run.yaml train_gpt3_175b.sh /checkpoints /logs vocab.json merges.txt /data/text

megatron-from-megatron --set DATA_PATH=/data/text --world-size 64 train.sh

megatron-from-megatron -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 ...

The script is read, not run. A variable without a value in the script or in --set is <NAME> in the output.
"""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("from_megatron")

import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron_core.commands.plan_layout import vocabulary
from megatron_core.config import RunConfig
from megatron_core.config.cli import read_flags, without_mode
from megatron_core.config.file import WRITTEN, changed_settings, write_config
from megatron_core.config.flags import grouped, plain
from megatron_core.config.rules_single import unread_settings
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError, MegatronError, shortened, visible
from megatron_core.features.as_megatron.differences import training_differences
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.megatron_flags.launch_flags import LaunchFlags, is_flag
from megatron_core.locations import path_of
from megatron_core.planner.explain import details, readable_bytes, readable_duration, readable_seconds
from megatron_core.planner.hardware import read_hardware
from megatron_core.planner.layout_settings import describe_layout
from megatron_core.planner.parameters import model_parameters
from megatron_core.planner.search import Search
from megatron_core.prepared_output import prepare_output
from megatron_core.shell.launch import Launch, LaunchScript, is_script, read_command_line, read_script
from megatron_core.shell.unknown import UNKNOWN, readable
from megatron_core.terminal import parse_flags
from megatron_core.text_file import read_table
from megatron_core.verify.comparison import changed_lines, changed_values, layout_task, require_legal

_TABLES = read_table(__file__)
HYBRID = tuple(_TABLES["hybrid"])
PRETRAINING = (*HYBRID, *_TABLES["gpt"])
"""Megatron-LM's training programs of models of text."""
GPT = (*PRETRAINING, *_TABLES["same_flags"])
"""Training programs whose flags mean the same here."""
OTHERS = {word: alternative for alternative, words in _TABLES["others"].items() for word in words.split()}
DEEPSPEED: list[str] = _TABLES["deepspeed"]
CLOSED = "is outside the folders of the script, or is not a file, and is not read; --read-from allows its folder"
_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class FromMegatronFlags:
    """Read a launch script or command line of Megatron-LM, and print its settings here, the differences, a YAML file,
    memory and time, and the command that compares its layout with one process.

    Exit status: 0 if the launch can start here unchanged, 1 if not, 2 for a script that cannot be read.
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """A launch script and its arguments; or, after --, a command line."""
    variables: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="NAME=VALUE")
    ] = ()
    """Variables of the environment in which the script would run."""
    read_from: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Further folders from which the script may read files with source, bash or sbatch, in addition to its own folder,
    those above it except a home folder, and the current folder."""
    world_size: int | None = None
    """Number of ranks; default: that of the launcher (torchrun, srun, mpirun), or the least that fits."""
    launch: int = 1
    """Which launch of the script to describe, if it has several."""
    hardware: str = "h100"
    """Machine for memory and time, as for megatron-plan."""
    output: str | None = None
    """Write the settings to this YAML file."""


@dataclass(frozen=True)
class TranslatedLaunch:
    """A launch, its flags sorted by treatment, its configuration and its ranks."""

    launch: Launch
    flags: LaunchFlags
    config: RunConfig
    world_size: int
    problems: tuple[str, ...]
    """Rules that the settings violate together."""

    deepspeed: str = ""
    """The settings of the file in --deepspeed_config; empty if there is none, or if it cannot be translated."""

    @classmethod
    def of(cls, launch: Launch, world_size: int | None) -> "TranslatedLaunch":
        """Translate the flags of a launch."""
        groups = grouped(list(launch.flags))
        replaced = DEEPSPEED if launch.deepspeed is not None else []
        usable = [group for group in groups if plain(group[0]) not in replaced and not {*group[1]} & {*launch.closed}]
        words = [word for flag, values in usable for word in (flag, *values)]
        flags = LaunchFlags.of(words, UNKNOWN)
        with redirect_stderr(io.StringIO()):  # the note about flags without effect is part of the report
            # Whoever moves a launch expects its training; --no-as-megatron in the launch, being later, overrides this.
            config, faults = read_flags(["--as-megatron", *flags.usable], prog="pretrain_gpt.py")
        ranks = world_size or launch.ranks or config.parallel.smallest_world_size
        faults_found = [fault for fault in faults if fault not in flags.refused]  # those of a configuration file
        translation = ""
        faults_found += [f"{readable(name)} {CLOSED}" for name in launch.closed]
        if launch.deepspeed is not None:
            from megatron_core.commands.deepspeed_config import with_deepspeed  # it imports torch

            try:
                config, translation = with_deepspeed(config, launch.deepspeed, ranks)
            except MegatronError as error:
                faults_found.append(f"--deepspeed_config: {error}")
        faults_found += problems(config, ranks)
        folder = None if config.checkpoint.load is None else path_of(config.checkpoint.load)
        if folder is not None and folder.is_dir():
            from megatron_core.hub.megatron_lm.format import checkpoint_changes  # it imports torch

            faults_found += checkpoint_changes(config)
        return cls(launch, flags, config, ranks, tuple(faults_found), translation)

    @property
    def can_train(self) -> bool:
        """Whether training would start with these settings."""
        return not (self.flags.refused or self.flags.unread or self.problems or self.other_model)

    @property
    def starts(self) -> bool:
        """Whether training would start with these flags."""
        return self.can_train and not self.deepspeed

    @property
    def other_model(self) -> str:
        """Why the program cannot be replaced; empty if it trains a GPT, or a hybrid model whose pattern is given."""
        program = self.launch.program
        words = () if Path(program).name in PRETRAINING else OTHERS
        word = next((word for word in words if re.search(rf"(?<![A-Za-z]){word}(?![A-Za-z])", program)), None)
        if word is None and program.endswith(HYBRID) and self.config.optional("hybrid_layer_pattern") is None:
            return (
                f"{readable(program)} trains a hybrid model; give --hybrid-layer-pattern; M for each layer "
                "if the model has only Mamba layers"
            )
        return f"{readable(program)} {OTHERS[word]}" if word else ""


def report_sections(translated: TranslatedLaunch, script: LaunchScript, settings: FromMegatronFlags) -> Iterator[str]:
    """Yield the sections of the report."""
    yield "\n".join(_heading(translated, script, settings))
    yield "\n".join(["What it does here", *_indented(_description(translated))])
    yield "\n".join(["What differs", *_indented(_differences(translated, script))])
    if not translated.can_train:
        yield "\n".join(["What to change first", *_indented(_changes(translated))])
    name = settings.output or "run.yaml"
    if settings.output is None:
        text = textwrap.indent(changed_settings(translated.config), "  ")
        yield f"The same settings as YAML (--output {name} writes them)\n{text}".rstrip()
    else:
        yield f"The same settings as YAML: {name}"
    yield "\n".join(["Memory and time", *_indented(_prediction(translated, settings, name))])
    yield "\n".join(["Proof: the layout computes what one process computes", *_indented(_proof(translated, name))])
    yield "\n".join(["Start", *_indented(_start(translated, name))])


def _heading(translated: TranslatedLaunch, script: LaunchScript, settings: FromMegatronFlags) -> Iterator[str]:
    launch = translated.launch
    where = f"{launch.location}: " if launch.location else ""
    source = "its launcher" if launch.ranks else "the least that fits"
    source = "--world-size" if settings.world_size else source
    ranks = translated.world_size
    yield f"{where}{readable(launch.program)} on {ranks:,} rank{'s' * (ranks != 1)} ({source})"
    if len(script.launches) > 1:
        listed = [f"{n}: {readable(launch.program)}, {launch.location}" for n, launch in enumerate(script.launches, 1)]
        yield f"launches in the script: {'; '.join(listed)}; --launch N describes another one"
    if translated.other_model:
        yield translated.other_model
    elif not launch.program.endswith(GPT):
        yield f"{readable(launch.program)} is treated as a GPT program; its changes to Megatron-LM are unknown"
    if translated.deepspeed and translated.can_train:
        yield "starts with the YAML below, which has the settings of the DeepSpeed file"
    else:
        yield "starts unchanged" if translated.starts else "does not start unchanged: see What to change first"


def _description(translated: TranslatedLaunch) -> Iterator[str]:
    config = translated.config
    ranks = translated.world_size
    model = config.model.section(MoEConfig)
    training = config.training
    optimizer = config.optimizer
    moe = f", {model.num_experts} experts of which a token uses {model.moe_router_topk}" if model.num_experts else ""
    yield (
        f"model: {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads{moe}, "
        f"{_parameters(model_parameters(config, vocabulary(config)))}, sequences of "
        f"{config.data.seq_length} tokens"
    )
    if not any("world_size=" in fault or "batch_size=" in fault for fault in translated.problems):
        copies = config.parallel.data_parallel_size(ranks)
        batch = training.final_batch_size(copies)
        yield f"layout: {describe_layout(config, ranks)}"
        steps = training.train_iters
        length = f"{steps:,} steps" if steps else f"{training.train_samples or 0:,} samples"
        yield f"training: {length}, {batch} sequences ({batch * config.data.seq_length:,} tokens) a step"
    dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(training.compute_dtype, training.compute_dtype)
    eight = f", fp8 {config.optional('fp8_format')}" if config.optional("fp8_format") else ""
    schedule = f"lr {optimizer.lr}, {optimizer.lr_decay_style} decay"
    yield f"precision: {dtype}{eight}; optimizer: {optimizer.optimizer}, {schedule}"
    data = [*config.data.data_path, *config.data.train_data_path]
    source = "mock data" if config.data.mock_data else " ".join(data) or "none given"
    yield f"data: {shortened(source)}; load {config.checkpoint.load}; save {config.checkpoint.save}"
    flags = translated.flags
    counts = len(flags.done), len(flags.translated), sum(map(len, flags.ignored.values())), len(flags.refused)
    yield "flags: {} with the same meaning, {} translated, {} without effect, {} refused".format(*counts)


def _differences(translated: TranslatedLaunch, script: LaunchScript) -> Iterator[str]:
    flags = translated.flags
    for theirs, ours in flags.translated.items():
        yield f"translated: {theirs} -> {ours}"
    if translated.deepspeed:
        yield f"translated: --deepspeed --deepspeed_config FILE -> {translated.deepspeed}"
    for reason, words in flags.ignored.items():
        yield f"without effect: {', '.join(words)}: {reason}"
    for name, reason in without_mode(translated.config, flags.usable).items():
        yield f"without effect: --{name.replace('_', '-')}: {reason}"
    if unread := unread_settings(translated.config, translated.world_size, device="cuda"):
        yield f"without effect in this run: {unread}"
    for flag, difference in flags.different_defaults(translated.config).items():
        yield f"default of Megatron-LM, not given: {flag}; {difference}"
    load = translated.config.checkpoint.load
    if load is not None and not Path(load).is_dir():
        yield (
            f"load {readable(load)} is not on this machine: to resume a checkpoint of Megatron-LM in it, give another "
            "folder with --save (docs/continue.md)"
        )
    if script.unset:
        yield f"not set in the script: {', '.join(script.unset)}; --set NAME=VALUE or the script's arguments give them"
    yield from script.notes
    set_names = flags.set_names()
    listed = training_differences(translated.config)
    differences = (difference for difference in listed if difference.of_default not in set_names)
    yield from (f"differs from Megatron-LM: {difference}" for difference in differences)
    yield "all other differences: docs/from_megatron.md"


def _changes(translated: TranslatedLaunch) -> Iterator[str]:
    if translated.other_model:
        yield translated.other_model
        return
    for flag, name in translated.flags.unread.items():
        yield f"{flag}: its value is not known; give --set {name}=VALUE, or the script's arguments"
    yield from translated.flags.refused
    yield from translated.problems


def _prediction(translated: TranslatedLaunch, settings: FromMegatronFlags, name: str) -> Iterator[str]:
    hardware = read_hardware(settings.hardware)
    search = Search(translated.config, translated.world_size, hardware, vocabulary(translated.config))
    try:
        layout = search.candidate(translated.config)
    except MegatronError as error:
        yield f"not known before the settings are legal: {shortened(str(error), 300)}"
        return
    room = readable_bytes(hardware.usable_bytes)
    fits = "fits" if search.fits(layout.memory) else "does not fit"
    yield (
        f"a step takes {readable_seconds(layout.seconds)} on {translated.world_size} x {hardware.name}, "
        f"{layout.cost.tokens_per_second:,.0f} tokens/s on each; {readable_bytes(layout.bytes)} {fits} into {room}"
    )
    yield from details(layout).splitlines()
    if translated.config.training.train_iters:
        yield f"all steps: {readable_duration(layout.seconds * translated.config.training.train_iters)}"
    batch = translated.config.training.global_batch_size
    if batch is not None:
        machine = f"--gpus {translated.world_size} --hardware {settings.hardware}"
        yield f"faster layouts: megatron-plan --config {name} {machine}"


def _proof(translated: TranslatedLaunch, name: str) -> Iterator[str]:
    config = translated.config
    least = config.parallel.smallest_world_size
    ranks = min(translated.world_size, 2 * least)
    try:
        if next(problems(config, translated.world_size), None) is not None:
            raise ConfigError("the settings cannot be used yet")
        task = layout_task(config, ranks)
        require_legal(task, "float64")
    except MegatronError as error:
        yield f"there is nothing to compare: {shortened(str(error), 300)}"
        return
    yield f"megatron-verify --config {name} --world-size {ranks}"
    count = translated.world_size // least
    copies = "" if ranks == translated.world_size else f"; two of its {count} copies are compared"
    yield f"layout {task.layouts[0]} with a small model on a CPU, in float64 and the dtype of a 16-bit run{copies}"
    yield from changed_lines(changed_values(task, config, "float64"))


def _start(translated: TranslatedLaunch, name: str) -> Iterator[str]:
    local = min(translated.launch.ranks_per_node or 8, translated.world_size)
    local = local if translated.world_size % local == 0 else translated.world_size
    nodes = translated.world_size // local
    several = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes > 1 else ""
    yield f"torchrun --nproc-per-node {local}{several} -m megatron_core.commands.train --config {name}"
    if translated.starts:
        yield "or the script itself with --as-megatron, and with this project's pretrain_gpt.py for Megatron-LM's"


def _parameters(number: int) -> str:
    return f"{number / 1e9:.3g} billion parameters" if number >= 1e8 else f"{number:,} parameters"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    """Wrap long lines at words, except commands."""
    for line in lines:
        is_command = line.startswith(("megatron-", "torchrun "))
        wrapped = [line] if is_command else textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
        yield from (f"  {'  ' * (number > 0)}{piece}" for number, piece in enumerate(wrapped or [""]))


def read_launches(settings: FromMegatronFlags, words: Sequence[str]) -> LaunchScript:
    """The launches in the script or command line; ``ConfigError`` if there is none."""
    if not words:
        raise ConfigError("give a launch script and its arguments, or a command line after --")
    pairs = [variable.partition("=") for variable in settings.variables]
    wrong = [name for name, equals, _ in pairs if not (equals and name.isidentifier())]
    if wrong:
        raise ConfigError(f"--set {wrong[0]}: give NAME=VALUE")
    if is_script(words[0]):
        variables = {name: value for name, _, value in pairs}
        launch = read_script(words[0], words[1:], variables, is_flag, settings.read_from)
    elif settings.command:
        raise ConfigError(f"{words[0]}: this script does not exist; put a command line after --")
    else:
        launch = read_command_line(words, is_flag)
    if not launch.launches:
        notes = "".join(f"; {note}" for note in launch.notes)
        raise ConfigError(
            f"{shortened(shlex.join(words))}: no start of a training program with flags of Megatron-LM was found"
            f"{notes}; give its command line after --"
        )
    return launch


def describe_launch(settings: FromMegatronFlags, words: Sequence[str]) -> int:
    """Print the report; 0 if the launch can start unchanged."""
    script = read_launches(settings, words)
    if not 1 <= settings.launch <= len(script.launches):
        raise ConfigError(f"--launch {settings.launch}: the number of launches in the script is {len(script.launches)}")
    if settings.world_size is not None and settings.world_size < 1:
        raise ConfigError(f"--world-size {settings.world_size} must be an integer >= 1")
    translated = TranslatedLaunch.of(script.launches[settings.launch - 1], settings.world_size)
    if settings.output is not None:
        prepare_output(settings, "output", WRITTEN, words)
        write_config(translated.config, settings.output, changed_only=True)
    print(visible("\n\n".join(report_sections(translated, script, settings))))
    return 0 if translated.starts else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, read the launch and print."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    position = words.index("--") if "--" in words else len(words)
    settings = parse_flags(FromMegatronFlags, args=words[:position], description=__doc__)
    return status_of(lambda: describe_launch(settings, settings.command or words[position + 1 :]), failed=2)
