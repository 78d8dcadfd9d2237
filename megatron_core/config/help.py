"""The help of programs that train: a first screen, a group of flags, a search, or all flags.

tyro prints a box for each group of settings, with a text for each flag; it gets only the flags to show.
"""

import ast
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, NamedTuple, get_type_hints

import tyro

from megatron_core.config.run import RunConfig
from megatron_core.config.values import ALL
from megatron_core.feature import feature_switches, shorthands
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
_WIDTH = 80


class _Flag(NamedTuple):
    """A flag of the help."""

    name: str
    kind: Any
    default: Any
    text: str

    @property
    def words(self) -> str:
        """The text that a search reads, in lower case with hyphens."""
        return f"--{self.name} {self.kind} {self.text} {self.default}".lower().replace("_", "-")

    @property
    def row(self) -> tuple[str, Any, Any]:
        """The flag for ``make_dataclass``, with its text on one line: tyro would break it where the source does."""
        shown = tyro.conf.arg(help=self.text, help_behavior_hint="(on by default)" if self.default is True else None)
        return self.name, Annotated[self.kind, shown], field(default=self.default)


def help_text(line_class: Any, topic: str, prog: str, defaults: RunConfig) -> str:
    """The help about ``topic``, or with "" its first screen, for the class of a command line."""
    text = _help_about(line_class(**defaults.sections()), topic, prog) if topic else _first_screen(line_class, prog)
    return text if "utf" in (sys.stdout.encoding or "").lower() else text.translate(WITHOUT_BOXES)


def _first_screen(line_class: Any, prog: str) -> str:
    """The first screen of the help; without tyro, which reads the sources of all settings and formats each."""
    sections = {name: hint for name, hint in get_type_hints(line_class).items() if is_dataclass(hint)}
    sizes = {name: len(fields(section)) for name, section in sections.items()}
    single_flags = [row.name for row in fields(line_class) if row.name not in sections and row.name != "features"]
    usage = f"usage: {Path(prog).name} [-h] [OPTIONS]"
    head = [usage, *filter(None, _description(prog).splitlines())]
    return first_screen(head, {"": len(single_flags)} | sizes, field_texts(line_class))


def _help_about(line: Any, topic: str, prog: str) -> str:
    """The help about a topic, for a command line with default values.

    ``ALL`` is everything, the name of a group its flags; any other word is searched in names and texts of all flags.
    """
    texts = field_texts(type(line)) | {name: row.help for name, row in (shorthands() | feature_switches()).items()}
    sections = {name: section for name, section in vars(line).items() if is_dataclass(section)}
    groups = {"": _flags_of(line, texts)}
    groups |= {name: _flags_of(section, field_texts(type(section))) for name, section in sections.items()}
    word = topic.lower().lstrip("-").replace("_", "-")
    chosen = {
        name: flags for name, flags in groups.items() if topic == ALL or (name and name.replace("_", "-") == word)
    }
    chosen = chosen or {name: [flag for flag in flags if word in flag.words] for name, flags in groups.items()}
    chosen = {name: flags for name, flags in chosen.items() if flags}
    if not chosen:
        names = [*(flag.name for flags in groups.values() for flag in flags), *groups]
        near = get_close_matches(topic.replace("_", "-"), [name.replace("_", "-") for name in names], n=3)
        hint = f"; similar: {', '.join(near)}" if near else ""
        return f"no flag has {topic!r} in its name or text{hint}; --help lists the groups"
    rows: list[Any] = [flag.row for flag in chosen.pop("", ())]
    has_single_flags = bool(rows)
    for name, flags in chosen.items():
        about = {"__doc__": texts.get(name, type(sections[name]).__doc__)}
        group: Any = make_dataclass(name, [flag.row for flag in flags], namespace=about)
        rows.append((name, group, field(default_factory=group)))
    text = _complete_help(make_dataclass("Line", rows), prog)
    if topic == ALL:
        return text
    # The lines before the boxes, and the first box if it has only --help, are the same for every topic.
    return text[text.index("╭") :] if has_single_flags else text.partition("╯\n")[2]


def _flags_of(section: Any, texts: Mapping[str, str]) -> list[_Flag]:
    """The flags of a section, or those of a command line outside of its sections."""
    kinds = get_type_hints(type(section))
    values = {name: value for name, value in vars(section).items() if name != "features" and not is_dataclass(value)}
    return [_Flag(name, kinds[name], value, texts[name]) for name, value in values.items()]


def _complete_help(line_class: Any, prog: str) -> str:
    """tyro's help of a command line."""
    output = io.TextIOWrapper(io.BytesIO(), "utf-8")  # tyro draws boxes for this encoding
    with redirect_stdout(output), suppress(SystemExit), _columns(min(get_terminal_size().columns, HELP_COLUMNS)):
        parse_flags(line_class, prog=prog, description=_description(prog), args=["--help"], config=_SHORT_HELP)
    output.seek(0)
    return output.read().rstrip("\n")


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
