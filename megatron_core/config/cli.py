"""Parses the command line into a ``RunConfig``: flags (by tyro), ``--config`` files, Megatron-LM's spellings."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import tyro

from megatron_core.config import megatron_flags
from megatron_core.config.file import field_types, read_config, write_config
from megatron_core.config.run import RunConfig
from megatron_core.errors import ConfigError

__all__ = ["DryRun", "parse_command_line", "parse_run_config", "write_config"]

MOST_REPEATS = 10_000
"""Largest factor in an expression for a list, such as [1]*24: far more layers than any model has."""

_FLAT = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
# Both --x and --no-x are accepted; the help shows only the one that changes the default.
_SHORT_HELP = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


@dataclass(frozen=True, kw_only=True)
class _CommandLine(RunConfig):
    """The settings of a run, and the file that overrides their defaults."""

    config: str | None = None
    """YAML or JSON file of settings. It overrides the defaults shown below, and flags override it."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Print what one rank of a world of any size would hold, instead of training."""

    dry_run: bool = False
    """Do not train; print the settings, groups, layers, parameters and memory of one rank of a world of any size."""
    world_size: int | None = None
    """With --dry-run: number of ranks of that world; default: the ranks of one model copy."""
    rank: int = 0
    """With --dry-run: the rank to describe."""


@dataclass(frozen=True, kw_only=True)
class _TrainingCommandLine(_CommandLine):
    """The command line of a program that trains."""

    dry: DryRun = field(default_factory=DryRun)
    """Describe a rank instead of training."""


Parsed = TypeVar("Parsed", bound=_CommandLine)


def parse_run_config(
    args: list[str] | None = None, *, prog: str = "pretrain_gpt.py", defaults: RunConfig | None = None
) -> RunConfig:
    """Read the command line, or ``args`` if given, into a ``RunConfig``.

    Flags are Megatron-LM's, with hyphens or underscores: ``--tensor-model-parallel-size 2 --bf16``.
    ``--config FILE`` overrides ``defaults``, and flags override both. ``--help`` prints every setting and exits with 0;
    an unknown flag or a value of the wrong type exits with 2 and names similar flags. All ranks exit, only
    rank 0 prints.

    Errors: ``ConfigError`` for a bad ``--config`` file and for flags of Megatron-LM that are not supported.
    """
    return RunConfig(**_sections(_parse(_CommandLine, args, prog, defaults)))


def parse_command_line(
    args: list[str] | None = None, *, prog: str = "pretrain_gpt.py", defaults: RunConfig | None = None
) -> tuple[RunConfig, DryRun]:
    """As ``parse_run_config``, with the flags of a dry run; ``ConfigError`` if they are given without ``--dry-run``."""
    parsed = _parse(_TrainingCommandLine, args, prog, defaults)
    if parsed.dry != DryRun() and not parsed.dry.dry_run:
        raise ConfigError(
            f"world_size={parsed.dry.world_size} and rank={parsed.dry.rank} have no effect without dry_run; "
            "add --dry-run or remove them"
        )
    return RunConfig(**_sections(parsed)), parsed.dry


def _parse(kind: type[Parsed], args: list[str] | None, prog: str, defaults: RunConfig | None) -> Parsed:
    given = list(sys.argv[1:] if args is None else args)
    flags = _translate(given)
    wants_help = "--help" in flags or "-h" in flags
    path = None if wants_help else _config_path(flags)
    defaults = defaults or RunConfig()
    defaults = defaults if path is None else read_config(path, defaults)
    return tyro.cli(
        kind,
        prog=prog,
        description=_description(prog),
        args=flags,
        default=kind(**_sections(defaults)),
        config=_FLAT + (_SHORT_HELP if wants_help else ()),
        console_outputs=_is_first_rank(),
    )


def _description(prog: str) -> str:
    """The help's first lines."""
    script = Path(prog).name
    return (
        "Settings come from defaults, then --config FILE, then flags.\n\n"
        "Hyphens and underscores are equivalent; every switch --x can be turned off with --no-x.\n\n"
        f"One process:  python {script} --mock-data --vocab-size 256 --train-iters 20\n\n"
        f"Two ranks:  torchrun --nproc-per-node 2 {script} --tensor-model-parallel-size 2 ..."
    )


def _sections(config: RunConfig) -> dict[str, Any]:
    """The sections of a configuration by name."""
    return {part.name: getattr(config, part.name) for part in fields(RunConfig)}


def _is_first_rank() -> bool:
    """Whether this process may print; every rank of a job parses the same command line."""
    return os.environ.get("RANK", "0") == "0"


def _config_path(flags: list[str]) -> str | None:
    """The last ``--config``, as tyro would read it."""
    paths = [values[0] for flag, values in _grouped(flags) if flag == "--config" and values]
    return paths[-1] if paths else None


def _translate(given: list[str]) -> list[str]:
    """Replace Megatron-LM's spellings by this project's; drop flags without effect, and print one note about them."""
    known = field_types()
    weak: list[str] = []
    strong: list[str] = []
    ignored: dict[str, str] = {}
    refused: list[str] = []
    for flag, values in _grouped(given):
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name in known:
            renamed = megatron_flags.SAME_VALUE.get(name, {})
            values = _numbers(flag, values) if name in megatron_flags.LISTS else values
            strong += [flag, *(renamed.get(value, value) for value in values)]
        elif f"no_{name}" in known:  # --load-optim overrides no_load_optim: true in the --config file
            strong += [f"--no-no-{name.replace('_', '-')}", *values]
        elif name in megatron_flags.SAME_AS:
            strong += [*megatron_flags.SAME_AS[name], *values]
        elif name in megatron_flags.RENAMED:
            strong += [f"--{megatron_flags.RENAMED[name].replace('_', '-')}", *values]
        elif name in megatron_flags.OVERRIDDEN_BY_FLAG:
            weak += megatron_flags.OVERRIDDEN_BY_FLAG[name]
            strong += values
        elif name in megatron_flags.SWITCHES_WITHOUT_EFFECT:
            ignored[flag] = megatron_flags.SWITCHES_WITHOUT_EFFECT[name]
            strong += values
        elif name in megatron_flags.VALUES_WITHOUT_EFFECT:
            ignored[flag] = megatron_flags.VALUES_WITHOUT_EFFECT[name]
        elif megatron_flags.ONLY_VALUE.get(name) in values:
            ignored[" ".join([flag, *values])] = "the only choice"
        elif name in megatron_flags.ONLY_VALUE:
            refused.append(f"{' '.join([flag, *values])} (only {megatron_flags.ONLY_VALUE[name]})")
        elif megatron_flags.is_unsupported(name):
            refused.append(flag)
        else:
            strong += [flag, *values]
    _refuse(refused)
    _note(ignored)
    return weak + strong


def _grouped(given: list[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values that follow it; ``--x=1`` is ``--x 1``."""
    groups: list[tuple[str, list[str]]] = []
    for token in given:
        if token.startswith("--") or not groups:
            flag, equals, value = token.partition("=")
            groups.append((flag, [value] if equals else []))
        else:
            groups[-1][1].append(token)
    return groups


def _numbers(flag: str, values: list[str]) -> list[str]:
    """The numbers of a list that is written as an expression, as Megatron-LM allows; other values unchanged."""
    if len(values) != 1:
        return values
    try:
        result = _value_of(ast.parse(values[0], mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{flag} {values[0]} cannot be read; write numbers (1 1 0) or a list ([1]*2+[0])") from error
    return [str(number) for number in (result if isinstance(result, list) else [result])]


def _value_of(node: ast.expr) -> Any:
    """A number or a flat list, from numbers, lists, + and *."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value_of(left) + _value_of(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))) if times <= MOST_REPEATS:
            return _value_of(left) * times
    raise ValueError(ast.dump(node))


def _refuse(refused: list[str]) -> None:
    """Raise one error for all flags that are not supported."""
    if refused:
        verb = "is" if len(refused) == 1 else "are"
        raise ConfigError(
            f"Megatron-LM's {', '.join(refused)} {verb} not supported by megatron-native (yet); "
            f"remove {'it' if len(refused) == 1 else 'them'}"
        )


def _note(ignored: dict[str, str]) -> None:
    """Print one note about all flags that were accepted without effect."""
    if ignored and _is_first_rank():
        by_reason: dict[str, list[str]] = {}
        for flag, reason in ignored.items():
            by_reason.setdefault(reason, []).append(flag)
        listed = "; ".join(f"{', '.join(flags)} ({reason})" for reason, flags in by_reason.items())
        print(f"note: accepted from Megatron-LM, without effect here: {listed}", file=sys.stderr)
