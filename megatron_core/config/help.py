"""The help of programs that train: a first screen, a group of flags, a search, or all flags.

tyro prints a box for each group of settings, with a text for each flag; ``shown`` selects parts of it.
"""

import ast
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, get_type_hints

import tyro

from megatron_core.config.run import RunConfig
from megatron_core.config.values import ALL
from megatron_core.terminal import parse_flags

HELP_COLUMNS = 100
"""Largest width of the help."""
# Both --x and --no-x are accepted; the help shows only the one that changes the default.
_SHORT_HELP = (
    *(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    *(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
)

MOST_USED = {
    "": ("config", "model_preset", "depth"),
    "model": (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "swiglu"),
        *("normalization", "position_embedding_type", "num_experts", "moe_router_topk", "recompute_granularity"),
    ),
    "parallel": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "sequence_parallel", "zero_stage"),
    ),
    "training": ("micro_batch_size", "global_batch_size", "train_iters", "eval_interval", "eval_iters", "bf16"),
    "optimizer": ("optimizer", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "weight_decay", "clip_grad"),
    "data": ("data_path", "seq_length", "split", "tokenizer_type", "tokenizer_model", "vocab_size", "mock_data"),
    "checkpoint": ("save", "save_interval", "load", "load_hf"),
    "monitor": ("log_interval", "metrics_file"),
    "dry": ("dry_run", "world_size", "rank"),
}
"""Settings on the first screen of the help, by group."""
WITHOUT_BOXES = str.maketrans("╭╮╰╯─│", "    - ")
"""Translation for terminals without Unicode."""
_FRAME = re.compile(r"╭─ (?:([\w-]+) )?options ─+╮")
_WIDTH = 80
_INDENT = "│       "
"""Before the text below a flag."""


@dataclass
class _Group:
    """A box of the complete help."""

    name: str
    """Empty for the group of --config and --model-preset."""
    frame: str
    """First line of the box."""
    about: list[str] = field(default_factory=list)
    """Lines before the first flag."""
    flags: list[list[str]] = field(default_factory=list)
    """Lines of each flag."""

    def box(self, flags: Sequence[list[str]]) -> list[str]:
        """Return the lines of a box with ``flags``."""
        return [self.frame, *self.about, *(line for flag in flags for line in flag), f"╰{'─' * (len(self.frame) - 2)}╯"]


def help_text(line_class: Any, topic: str, prog: str, defaults: RunConfig) -> str:
    """The help about ``topic``, or with "" its first screen, for the class of a command line."""
    text = _complete_help(line_class, topic, prog, defaults) if topic else _first_screen(line_class, prog)
    return text if "utf" in (sys.stdout.encoding or "").lower() else text.translate(WITHOUT_BOXES)


def _complete_help(line_class: Any, topic: str, prog: str, defaults: RunConfig) -> str:
    """The part of tyro's help about ``topic``."""
    complete = io.TextIOWrapper(io.BytesIO(), "utf-8")  # tyro draws boxes for this encoding
    with redirect_stdout(complete), suppress(SystemExit), _columns(min(get_terminal_size().columns, HELP_COLUMNS)):
        default, description = line_class(**defaults.sections()), _description(prog)
        parse_flags(
            line_class, prog=prog, description=description, args=["--help"], default=default, config=_SHORT_HELP
        )
    complete.seek(0)
    return help_about(complete.read(), topic)


def _first_screen(line_class: Any, prog: str) -> str:
    """The first screen of the help; without tyro, which reads the sources of all settings and formats each."""
    sections = {name: hint for name, hint in get_type_hints(line_class).items() if is_dataclass(hint)}
    sizes = {name: len(fields(section)) for name, section in sections.items()}
    single_flags = [row.name for row in fields(line_class) if row.name not in sections and row.name != "features"]
    usage = f"usage: {Path(prog).name} [-h] [OPTIONS]"
    head = [usage, *filter(None, _description(prog).splitlines())]
    return first_screen(head, {"": len(single_flags)} | sizes, field_texts(line_class))


@contextmanager
def _columns(number: int) -> Iterator[None]:
    """Let tyro use this width; on wider terminals it prints several boxes side by side."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _description(prog: str) -> str:
    """The help's first lines."""
    script = Path(prog).name
    alone, several = f"python {script}", f"torchrun --nproc-per-node 2 {script}"
    if not script.endswith(".py"):
        alone, several = script, f"{script} --nproc-per-node 2"
    return (
        "Settings come from defaults, then --model-preset or --depth, then --config FILE, then flags.\n\n"
        "Hyphens and underscores are equivalent; every switch --x can be turned off with --no-x.\n\n"
        f"One process:  {alone} --mock-data --vocab-size 256 --train-iters 20\n\n"
        f"Two ranks:  {several} --tensor-model-parallel-size 2 ..."
    )


def first_screen(head: Iterable[str], sizes: Mapping[str, int], purposes: Mapping[str, str]) -> str:
    """Return ``head``, the most used flags of each group of the core and the names of the other groups.

    Args:
        head: The first lines.
        sizes: The number of flags of each group, by name; "" is the group of the files of settings.
        purposes: A sentence about each group of the core.
    """
    lines = [*head, ""]
    for group, common in MOST_USED.items():
        if group in sizes:
            lines.append(f"{group}: {purposes[group]} ({sizes[group]} flags)" if group else "files of settings:")
            lines += _wrapped(" ".join(f"--{name.replace('_', '-')}" for name in common), "  ")
    optional = sorted(group.replace("_", "-") for group in sizes if group not in MOST_USED)
    lines += _wrapped(f"features: {', '.join(optional)}")
    lines += [
        "",
        "--help GROUP  the flags of a group, such as --help parallel",
        "--help WORD   the flags with a word in their names or texts, such as --help recompute",
        f"--help {ALL}    all {sum(sizes.values())} flags",
    ]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)


def help_about(complete: str, topic: str) -> str:
    """Return the part of tyro's ``complete`` help about ``topic``.

    ``ALL`` is everything, the name of a group its flags; any other word is searched in names and texts of all flags.
    """
    head, groups = _parts(complete)
    if topic == ALL:
        return "\n".join([*head, *(line for group in groups for line in group.box(group.flags))])
    word = topic.lower().lstrip("-").replace("_", "-")
    group = next((group for group in groups if word and group.name == word), None)
    if group is not None:
        return "\n".join(group.box(group.flags))
    lines: list[str] = []
    for group in groups:
        if flags := [flag for flag in group.flags if word in _text(flag)]:
            lines += group.box(flags)
    return "\n".join(lines) if lines else _nothing(topic, groups)


def _parts(complete: str) -> tuple[list[str], list[_Group]]:
    """Return the lines before the first box, without empty ones, and the groups."""
    head: list[str] = []
    groups: list[_Group] = []
    for line in complete.splitlines():
        if frame := _FRAME.fullmatch(line):
            groups.append(_Group(frame[1] or "", line))
        elif not groups:
            head += [line] if line.strip() else []
        elif line.startswith("│ -"):
            groups[-1].flags.append([line])
        elif line.startswith("│"):
            (groups[-1].flags[-1] if groups[-1].flags else groups[-1].about).append(line)
    for group in groups:
        group.flags = [_filled(flag, len(group.frame)) for flag in group.flags]
    return [*head, ""], groups


def _filled(flag: Sequence[str], width: int) -> list[str]:
    """Fill the lines below a flag: tyro also breaks them where lines of the source end.

    A switch that is on is shown as --no-x with the text of x.
    """
    texts = [line for line in flag if line.startswith(_INDENT)]
    if any(line[len(_INDENT)] == " " for line in texts):  # next to the flag, on a wide terminal
        return list(flag)
    text = " ".join(line.strip("│ ") for line in texts)
    if flag[0].startswith("│ --no-"):
        text = text.replace("(default: True)", "(on by default)")
    size = width - len(_INDENT) - len(" │")
    filled = textwrap.wrap(text, size, break_on_hyphens=False, break_long_words=False)
    return [*(line for line in flag if line not in texts), *(f"{_INDENT}{words:{size}} │" for words in filled)]


def _nothing(topic: str, groups: Sequence[_Group]) -> str:
    names = [_name(flag).replace("_", "-") for group in groups for flag in group.flags]
    near = get_close_matches(topic.replace("_", "-"), [*names, *(group.name for group in groups)], n=3)
    hint = f"; similar: {', '.join(near)}" if near else ""
    return f"no flag has {topic!r} in its name or text{hint}; --help lists the groups"


def _name(flag: Sequence[str]) -> str:
    """Return the name of a setting: of ``--no-x``, which the help shows instead of ``--x``, ``x``."""
    spelling = flag[0].strip("│ ").split()[0].rstrip(",")
    return spelling.removeprefix("--no-").removeprefix("--").replace("-", "_")


def _text(flag: Sequence[str]) -> str:
    """Return name and text of a flag as one line of lower case."""
    return " ".join(line.strip("│ ") for line in flag).lower().replace("_", "-")


def field_texts(kind: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass and its bases, each on one line."""
    texts: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):  # a class created at run time has no source
            continue
        for attribute, text in pairwise(getattr(tree, "body", [])):
            match attribute, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[name] = " ".join(words.split())
    return texts
