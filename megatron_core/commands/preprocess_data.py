r"""Convert text to token files for training.

megatron-preprocess --input corpus.jsonl --output-prefix corpus \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod

Writes corpus_text_document.bin and .idx, byte for byte as Megatron-LM does, and a .json that names the tokenizer;
unreadable and empty documents are listed in corpus_problems.txt. After an interruption, a full disk or a damaged input
file, the same command resumes (corpus.work keeps the progress). Memory does not depend on the size of the input: each
worker holds 0.25 MiB of text with its tokens, or one document of up to 256 MiB, and three tasks of 4 MiB.
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("preprocess_data")

import sys
from collections.abc import Sequence
from typing import NoReturn

import tyro

from megatron_core.command import program
from megatron_core.commands.start import run_tool
from megatron_core.errors import ConfigError
from megatron_core.preprocess import PreprocessSettings, preprocess
from megatron_core.terminal import parse_flags
from megatron_core.text_file import read_table


def main() -> NoReturn:
    """Parse the flags, run and exit."""
    run_tool(program(), _run, interrupted="interrupted; run the same command to resume")


def _run() -> None:
    flags = translate(sys.argv[1:])
    preprocess(parse_flags(PreprocessSettings, args=flags, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))


_TABLES = read_table(__file__)
WITHOUT_EFFECT: dict[str, list[str]] = _TABLES["without_effect"]
"""Flags, and the values with which they have no effect here."""
RENAMED: dict[str, str] = _TABLES["renamed"]
"""Flags and tokenizer types with a different name here."""
REFUSED = {flag: reason for reason, flags in _TABLES["refused"].items() for flag in flags.split()}
"""Why a flag with any other value is not supported, and the fix."""


def translate(flags: Sequence[str]) -> list[str]:
    """Return the flags without Megatron-LM's flags that have no effect here; the removed flags are listed on stderr.

    ConfigError: a flag is not supported.
    """
    with_effect: list[str] = []
    dropped: list[str] = []
    for flag, values in _grouped(flags):
        name = flag.replace("_", "-")
        words = " ".join([flag, *values])
        if name == "--tokenizer-type":
            values = [RENAMED.get(value, value) for value in values]
        if name in WITHOUT_EFFECT and values == WITHOUT_EFFECT[name]:
            dropped.append(words)
        elif name in REFUSED:
            raise ConfigError(f"{words}: {REFUSED[name]}")
        else:
            with_effect += [RENAMED.get(name, flag), *values]
    if dropped:
        print(f"without effect here: {', '.join(dropped)}", file=sys.stderr)
    return with_effect


def _grouped(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group each flag with its values; `--x=1` stays one word unless only Megatron-LM has the flag."""
    groups: list[tuple[str, list[str]]] = []
    for word in flags:
        if not word.startswith("--") and groups:
            groups[-1][1].append(word)
            continue
        flag, equals, value = word.partition("=")
        foreign = equals and flag.replace("_", "-") in {*REFUSED, *RENAMED}
        groups.append((flag, [value]) if foreign else (word, []))
    return groups
