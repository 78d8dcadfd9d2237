"""Command line to ``RunConfig``: flat flags by tyro, ``--config`` files, Megatron-LM's spellings."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from megatron_core.config import megatron_flags
from megatron_core.config.file import field_types, read_config, write_config
from megatron_core.config.run import RunConfig
from megatron_core.errors import ConfigError

__all__ = ["parse_run_config", "write_config"]

_FLAT = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
# Both --x and --no-x are always understood, but the help shows only the one that changes something.
_SHORT_HELP = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


@dataclass(frozen=True, kw_only=True)
class _CommandLine(RunConfig):
    """A run's settings and where their defaults come from."""

    config: str | None = None
    """YAML or JSON file of settings; flags override it, and it overrides the defaults below."""


def parse_run_config(args: list[str] | None = None, *, prog: str = "pretrain_gpt.py") -> RunConfig:
    """Read the command line, or ``args`` in its place, into a ``RunConfig``.

    Flags are Megatron-LM's, with hyphens or underscores: ``--tensor-model-parallel-size 2 --bf16``.
    ``--config FILE`` gives the defaults that they override. ``--help`` prints every setting and exits with 0;
    an unknown flag or a value of the wrong type exits with 2 and names the nearest flags. All ranks exit,
    rank 0 alone prints.

    Errors: ``ConfigError`` for a bad ``--config`` file and for flags of Megatron-LM that are not supported.
    """
    given = list(sys.argv[1:] if args is None else args)
    flags = _translate(given)
    wants_help = "--help" in flags or "-h" in flags
    path = None if wants_help else _config_path(flags)
    defaults = RunConfig() if path is None else read_config(path)
    parsed = tyro.cli(
        _CommandLine,
        prog=prog,
        description=_description(prog),
        args=flags,
        default=_CommandLine(**_sections(defaults)),
        config=_FLAT + (_SHORT_HELP if wants_help else ()),
        console_outputs=_is_first_rank(),
    )
    return RunConfig(**_sections(parsed))


def _description(prog: str) -> str:
    """The help's first lines."""
    script = Path(prog).name
    return (
        "Settings come from defaults, then --config FILE, then flags.\n\n"
        "Hyphens and underscores are the same; every switch --x has its --no-x.\n\n"
        f"One process:  python {script} --mock-data --vocab-size 256 --train-iters 20\n\n"
        f"Two ranks:  torchrun --nproc-per-node 2 {script} --tensor-model-parallel-size 2 ..."
    )


def _sections(config: RunConfig) -> dict[str, object]:
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
    """Megatron-LM's spellings in this project's words; what has no effect goes, with one note."""
    known = field_types()
    weak: list[str] = []
    strong: list[str] = []
    ignored: dict[str, str] = {}
    refused: list[str] = []
    for flag, values in _grouped(given):
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name in known:
            renamed = megatron_flags.SAME_VALUE.get(name, {})
            strong += [flag, *(renamed.get(value, value) for value in values)]
        elif f"no_{name}" in known:  # --load-optim takes a --no-load-optim of the --config file back
            strong += [f"--no-no-{name.replace('_', '-')}", *values]
        elif name in megatron_flags.SAME_AS:
            strong += [*megatron_flags.SAME_AS[name], *values]
        elif name in megatron_flags.RENAMED:
            strong += [f"--{megatron_flags.RENAMED[name].replace('_', '-')}", *values]
        elif name in megatron_flags.SAME_UNLESS_SAID:
            weak += megatron_flags.SAME_UNLESS_SAID[name]
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


def _refuse(refused: list[str]) -> None:
    """All flags that cannot be honoured, in one error."""
    if refused:
        verb = "is" if len(refused) == 1 else "are"
        raise ConfigError(
            f"Megatron-LM's {', '.join(refused)} {verb} not supported by megatron-native (yet); "
            "remove what you can spare"
        )


def _note(ignored: dict[str, str]) -> None:
    """Say once what was accepted without effect."""
    if ignored and _is_first_rank():
        by_reason: dict[str, list[str]] = {}
        for flag, reason in ignored.items():
            by_reason.setdefault(reason, []).append(flag)
        listed = "; ".join(f"{', '.join(flags)} ({reason})" for reason, flags in by_reason.items())
        print(f"note: accepted from Megatron-LM, without effect here: {listed}", file=sys.stderr)
