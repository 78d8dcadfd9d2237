"""The help of programs that train: a first screen, a group of flags, a search, or all flags.

tyro prints a box for each group of settings, with a text for each flag; ``shown`` selects parts of it.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

ALL = "all"
"""The topic of the complete help."""
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

    def summary(self) -> Iterator[str]:
        """Yield the name, purpose and most used flags of the group."""
        purpose = " ".join(line.strip("│ ") for line in self.about if "──" not in line)
        yield f"{self.name}: {purpose} ({len(self.flags)} flags)" if self.name else "files of settings:"
        known = {_name(flag): flag[0].split()[1] for flag in self.flags}
        common_flags = [known[name] for name in MOST_USED.get(self.name, ()) if name in known]
        yield from textwrap.wrap(
            " ".join(common_flags), _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )


def requested_topic(args: Sequence[str]) -> str | None:
    """Return the word after ``--help`` or ``-h``: "" if there is none, None without ``--help``."""
    index = next((index for index, word in enumerate(args) if word in ("--help", "-h")), None)
    if index is None:
        return None
    word = args[index + 1] if index + 1 < len(args) else ""
    return "" if word.startswith("-") else word


def shown(complete: str, topic: str) -> str:
    """Return the part of tyro's ``complete`` help about ``topic``.

    "" is the first screen, ``ALL`` everything, the name of a group its flags; any other word is searched in the names
    and texts of all flags.
    """
    head, groups = _parts(complete)
    if topic == ALL:
        return "\n".join([*head, *(line for group in groups for line in group.box(group.flags))])
    word = topic.lower().lstrip("-").replace("_", "-")
    group = next((group for group in groups if word and group.name == word), None)
    if group is not None:
        return "\n".join(group.box(group.flags))
    if not topic:
        return "\n".join([*head, *_first_screen(groups), "", *_more(groups)])
    lines: list[str] = []
    for group in groups:
        if flags := [flag for flag in group.flags if word in _text(flag)]:
            lines += group.box(flags)
    return "\n".join(lines) if lines else _nothing(topic, groups)


def _first_screen(groups: Sequence[_Group]) -> Iterator[str]:
    """Yield the summaries of the core's groups, and the names of the other groups, which belong to features."""
    optional = [group.name for group in groups if group.name not in MOST_USED and group.flags]
    for group in groups:
        if group.name not in optional:
            yield from group.summary()
    names = f"features: {', '.join(sorted(optional))}"
    yield from textwrap.wrap(names, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


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


def _more(groups: Sequence[_Group]) -> list[str]:
    count = sum(len(group.flags) for group in groups)
    return [
        "--help GROUP  the flags of a group, such as --help parallel",
        "--help WORD   the flags with a word in their names or texts, such as --help recompute",
        f"--help {ALL}    all {count} flags",
    ]


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
