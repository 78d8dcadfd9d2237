"""Parses the command line into a ``RunConfig``: flags (by tyro), ``--config`` files, Megatron-LM's spellings."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Annotated, Any, NoReturn, TypeAlias, get_type_hints

import tyro

from megatron_core.config.file import config_and_faults, names_in
from megatron_core.config.file import write_config as write_config
from megatron_core.config.flags import Translation, command_line, grouped, plain, to_flag
from megatron_core.config.rules_single import missing_modes, unread_settings, wrong_types
from megatron_core.config.run import RunConfig, aliases, field_types, section_types, settings
from megatron_core.config.validate import check, numbered, problems, without_data
from megatron_core.errors import ConfigError, wrapped
from megatron_core.feature import feature_switches, features, load_hook, shorthands
from megatron_core.launcher import read_integer
from megatron_core.terminal import PRINT_COMPLETION, discard, parse_flags

_FLAT = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)


@dataclass(frozen=True, kw_only=True)
class _CommandLine(RunConfig):
    """The settings of a run, and the file that overrides their defaults."""

    features: Annotated[tuple[Any, ...], tyro.conf.Suppress, tyro.conf.Fixed] = ()
    """Not a flag: ``_with_features`` adds a field for each section of the features."""
    config: str | None = None
    """YAML or JSON file of settings. It overrides the defaults shown below, and flags override it."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Print what one rank of a world of any size would hold, instead of training."""

    dry_run: bool = False
    """Do not train; print the settings, groups, layers, parameters and memory of one rank of a world of any size."""
    world_size: int | None = None
    """With --dry-run: number of ranks of that world; default: the least that fits."""
    rank: int = 0
    """With --dry-run: the rank to describe."""


@dataclass(frozen=True, kw_only=True)
class _TrainingCommandLine(_CommandLine):
    """The command line of a program that trains."""

    dry: DryRun = field(default_factory=DryRun)
    """Describe a rank instead of training."""


CommandLine: TypeAlias = tuple[RunConfig, DryRun]
"""The settings of a command line, and of its dry run."""


def _with_features(line_class: type[_CommandLine]) -> type[_CommandLine]:
    """Derive a class with a field for each section, with the settings of all features, and for each flag of a feature
    that stands for settings."""
    base: Any = line_class
    flags: list[tuple[str, str, bool | None]] = [(name, row.help, None) for name, row in shorthands().items()]
    flags += [(name, switch.help, False) for name, switch in feature_switches().items()]
    return _derived(base, tuple(section_types().items()), tuple(flags))


@cache
def _derived(line_class: Any, sections: tuple[tuple[str, type[Any]], ...], flags: tuple[Any, ...]) -> Any:
    added: list[tuple[str, Any, Any]] = [(name, section, field(default_factory=section)) for name, section in sections]
    for name, text, default in flags:
        kind: Any = bool if default is False else str | None
        added.append((name, Annotated[kind, tyro.conf.arg(help=text)], field(default=default)))
    return make_dataclass(line_class.__name__, added, bases=(line_class,), frozen=True, kw_only=True)


def parse_run_config(
    args: list[str] | None = None, *, prog: str = "pretrain_gpt.py", defaults: RunConfig | None = None
) -> RunConfig:
    """Read the command line, or ``args`` if given, into a ``RunConfig``.

    Flags are Megatron-LM's, with hyphens or underscores: ``--tensor-model-parallel-size 2 --bf16``.
    ``--config FILE`` overrides ``defaults``, and flags override both. ``--help`` prints the help and exits with 0.

    Errors: one ``ConfigError`` for a bad ``--config`` file, unknown flags (with similar names), values of the wrong
    type and flags of Megatron-LM that are not supported.
    """
    (config, _), faults = _parse(_CommandLine, args, prog, defaults)
    if faults:
        raise ConfigError(numbered(faults, "this command line"))
    return config


def parse_command_line(
    args: list[str] | None = None, *, prog: str = "pretrain_gpt.py", defaults: RunConfig | None = None
) -> CommandLine:
    """As ``parse_run_config``, with the flags of a dry run.

    Faults of flags come in one error with those of the remaining settings, for the number of ranks of the dry run or of
    the launcher (``WORLD_SIZE``).
    """
    (config, dry), faults = _parse(_TrainingCommandLine, args, prog, defaults)
    if dry != DryRun() and not dry.dry_run:
        faults.append(
            f"world_size={dry.world_size} and rank={dry.rank} have no effect without dry_run; "
            "add --dry-run or remove them"
        )
    if faults and dry.dry_run:
        check(without_data(config), dry.world_size or config.parallel.smallest_world_size, faults)
    elif faults and (config.checkpoint.load_hf is not None or config.checkpoint.use_checkpoint_args):
        raise ConfigError(numbered(faults, "this command line"))  # other settings come from the folder
    elif faults:
        check(config, read_integer("WORLD_SIZE", 1, least=1), faults)
    return config, dry


def read_flags(args: list[str], *, prog: str = "pretrain_gpt.py") -> tuple[RunConfig, list[str]]:
    """The settings of the flags in ``args`` that can be used, and a message for each of the others."""
    (config, _), faults = _parse(_CommandLine, args, prog, None)
    return config, faults


def training_flags() -> dict[str, Any]:
    """The type of each flag of a program that trains."""
    return _types(_TrainingCommandLine)


def _parse(
    line_class: type[_CommandLine], args: list[str] | None, prog: str, defaults: RunConfig | None
) -> tuple[CommandLine, list[str]]:
    """The settings, and a message for each flag that was left out because it cannot be used."""
    words, is_final = list(sys.argv[1:] if args is None else args), defaults is not None
    topic = _requested_topic(words)
    if words[:1] == [PRINT_COMPLETION]:
        complete, defaults = _with_features(line_class), defaults or RunConfig()
        parse_flags(complete, prog=prog, args=words, default=complete(**defaults.sections()), config=_FLAT)  # exits
    if topic is not None:
        from megatron_core.config.help import help_text  # only here: no other program reads its tables

        _print_help(help_text(_with_features(line_class), topic, prog, defaults or RunConfig()))
    # tyro ends the program at the first flag that it does not know; here all faults are collected for one message.
    translation = Translation.of(words, _types(line_class))
    path = _last_value(translation.flags, "--config")
    names = {plain(flag) for flag, _ in grouped(translation.flags)}
    defaults = defaults or RunConfig()
    for name, shorthand in shorthands().items():
        flag = to_flag(name)
        value = _last_value(translation.flags, flag)
        if value is None:
            continue
        try:
            chosen, remark = shorthand.settings(value, names if path is None else names | names_in(path))
        except ConfigError as error:
            translation.faults.append(str(error))
            continue
        defaults = RunConfig.from_flat(defaults.flat() | chosen)
        if remark and _is_first_rank():
            print(wrapped(f"note: {flag}: {remark}"), file=sys.stderr)
    if path is not None:
        defaults, faults = config_and_faults(path, defaults, names)
        translation.faults += faults
    config, dry = _read(translation, prog, defaults)
    if any(wrong_types(config.flat())):
        return (config, dry), translation.faults  # conditions assume known words
    config = _with_switches(config, translation, names, path)
    # Leave out refinements of modes that are off; the model of a folder may have them, see read_settings.
    waits = not is_final and settings_from_folder(config)
    off = {} if waits else without_mode(config, translation.flags)
    values = RunConfig().flat()
    if off:
        config = RunConfig.from_flat(config.flat() | {name: values[name] for name in off})
        translation.ignored |= {to_flag(name): reason for name, reason in off.items()}
    if not translation.faults:
        _note(translation.ignored)
    return (config, dry), translation.faults


def _with_switches(config: RunConfig, line: Translation, names: set[str], path: str | None) -> RunConfig:
    """``config`` with the settings that switches choose, except those of the flags ``names`` and of the file."""
    for name, switch in feature_switches().items():
        given_last = [flag for flag, _ in grouped(line.flags) if plain(flag) in (name, f"no_{name}")][-1:]
        if given_last == [to_flag(name)]:
            names = names if path is None else names | names_in(path)
            chosen = load_hook(switch.settings)(config, {plain(flag) for flag in line.ignored})
            added = {key: value for key, value in chosen.items() if names.isdisjoint((key, f"no_{key}"))}
            config = RunConfig.from_flat(config.flat() | added)
    return config


def _read(line: Translation, prog: str, defaults: RunConfig) -> CommandLine:
    """``defaults`` with the values of the flags, all of which are known and can be read."""
    names = (plain(flag) for flag, _ in grouped(line.flags))
    named = dict.fromkeys(name if name in line.known else name.removeprefix("no_") for name in names)
    settings_before, dry_before = defaults.flat(), vars(DryRun())
    values: dict[str, Any] = dict.fromkeys(line.known, "") | dict.fromkeys(feature_switches(), False)
    values |= settings_before | dry_before
    # Only these fields, because tyro takes 0.2 s on every rank for all 500.
    flags = make_dataclass("Flags", [(name, line.known[name], field(default=values[name])) for name in named])
    values |= vars(parse_flags(flags, prog=prog, args=line.flags, config=_FLAT, console_outputs=_is_first_rank()))
    config = RunConfig.from_flat({name: values[name] for name in settings_before})
    return config, DryRun(**{name: values[name] for name in dry_before})


def settings_from_folder(config: RunConfig) -> bool:
    """Whether settings without a flag come from a checkpoint or model, which is read later."""
    rows = (row for feature in features() for row in feature.checkpoint_formats)
    values = config.flat()
    folders = (values.get(row.setting) for row in rows if row.setting is not None)
    return config.checkpoint.use_checkpoint_args or any(folder is not None for folder in folders)


def without_mode(config: RunConfig, flags: list[str]) -> dict[str, str]:
    """The settings of ``flags`` that Megatron-LM ignores without a mode which ``config`` does not have; the reason."""
    names = {aliases().get(name := plain(flag), name).removeprefix("no_") for flag, _ in grouped(flags)}
    missing = missing_modes(config, sorted(names & refinements()))
    return {name: f"no effect {'with' if mode.excludes else 'without'} {mode.words}" for name, mode in missing.items()}


def refinements() -> set[str]:
    """The settings that refine a mode."""
    return {name for name, declared in settings().items() if declared.is_refinement}


def _requested_topic(args: Sequence[str]) -> str | None:
    """Return the word after ``--help`` or ``-h``: "" if there is none, None without ``--help``."""
    index = next((index for index, word in enumerate(args) if word in ("--help", "-h")), None)
    if index is None:
        return None
    word = args[index + 1] if index + 1 < len(args) else ""
    return "" if word.startswith("-") else word


def _print_help(text: str) -> NoReturn:
    """Print the help on the first rank and exit with 0, also if the output pipe is closed early."""
    try:
        if _is_first_rank():
            print(text, flush=True)
    except BrokenPipeError:
        discard(sys.stdout)
    sys.exit(0)


def note_unread_flags(config: RunConfig, args: list[str] | None = None) -> None:
    """Print one note about flags that give a setting its default value and have no effect in ``config``.

    Other values without effect are refused, or named when the training starts.
    """
    world_size = read_integer("WORLD_SIZE", 1, least=1)
    if not _is_first_rank() or any(problems(config, world_size)):
        return  # what cannot be used is an error
    values, defaults = config.flat(), RunConfig().flat()
    flags = Translation.of(list(sys.argv[1:] if args is None else args), training_flags()).flags
    named = {name if (name := plain(flag)) in values else name.removeprefix("no_") for flag, _ in grouped(flags)}
    named -= refinements()  # _parse has named them
    same = [name for name in values if name in named and values[name] == defaults[name] and values[name] is not False]
    if unread := unread_settings(config, world_size, device="", names=same):
        print(wrapped(f"note: without effect here: {unread}"), file=sys.stderr)


def _types(line_class: type[_CommandLine]) -> dict[str, Any]:
    """The type of each flag of a command line."""
    dry = get_type_hints(DryRun) if issubclass(line_class, _TrainingCommandLine) else {}
    return field_types() | command_line() | dry


def _is_first_rank() -> bool:
    """Whether this process may print; every rank of a job parses the same command line."""
    return os.environ.get("RANK", "0") == "0"


def _last_value(flags: list[str], name: str) -> str | None:
    """The last value of a flag, as tyro would read it."""
    values_of_flag = [values[0] for flag, values in grouped(flags) if flag.replace("_", "-") == name and values]
    return values_of_flag[-1] if values_of_flag else None


def _note(ignored: dict[str, str]) -> None:
    """Print one note about all flags that were accepted without effect."""
    if ignored and _is_first_rank():
        by_reason: dict[str, list[str]] = {}
        for flag, reason in ignored.items():
            by_reason.setdefault(reason, []).append(flag)
        listed = "; ".join(f"{', '.join(flags)} ({reason})" for reason, flags in by_reason.items())
        print(wrapped(f"note: without effect here, accepted from Megatron-LM: {listed}"), file=sys.stderr)
