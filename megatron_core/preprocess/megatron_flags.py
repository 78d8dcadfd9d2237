"""Flags that only Megatron-LM's `preprocess_data.py`, or a fork's, has: renamed, accepted where they change nothing,
refused elsewhere."""

import sys
from collections.abc import Sequence

from megatron_core.errors import ConfigError

WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "--dataset-impl": ("mmap",),
    "--lang": ("english",),
    "--legacy-tokenizer": (),
    "--vocab-extra-ids": ("0",),
}
"""Flags, and the only values with which they change nothing here."""

RENAMED = {
    **{"--vocab": "--vocab-file", "--json-key": "--json-keys", "--tokenizer-name-or-path": "--tokenizer-model"},
    **{"PretrainedFromHF": "HuggingFaceTokenizer", "HFTokenizer": "HuggingFaceTokenizer"},
}
"""Flags, and kinds of tokenizers, that have another name here."""

CONVERSATIONS = "conversations are prepared by training with --sft (docs/data.md); leave it out"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("--handler-name", "--prompt-type", "--map-keys", "--pack", "--neat-pack"), CONVERSATIONS),
    "--chunk-size": "work is cut into parts that fit; leave it out",
    "--overwrite-cache": "no cache is written; leave it out",
    "--dataset-impl": "token files are always memory-mapped; leave it out, or give mmap",
    "--lang": "sentences are cut by rules that were trained on no language; leave it out",
    "--legacy-tokenizer": "it takes no value; leave it out",
    "--vocab-extra-ids": "prepared ids are those of the tokenizer alone; leave it out, or give 0",
    "--find-optimal-num-workers": "without --workers there are as many as cores; leave it out",
    "--workers-to-check": "without --workers there are as many as cores; leave it out",
    "--max-documents": "all documents are prepared; give a shorter file, and leave it out",
    "--performance-dir": "the speed is printed at the end; leave it out",
    "--tiktoken-special-tokens": "the special tokens of TikTokenizer have fixed names; leave it out",
    "--trust-remote-code": "no code comes with a tokenizer, only its files are read; leave it out",
    "--tokenizer-metadata": "the tokenizer's own files say everything; leave it out",
}
"""Why a flag with any other value cannot be honoured, and the way out."""


def translate(flags: Sequence[str]) -> list[str]:
    """The flags without those of Megatron-LM that change nothing here, which are named on stderr.

    ConfigError: one would change something that cannot be changed here.
    """
    kept: list[str] = []
    dropped: list[str] = []
    for flag, values in _grouped(flags):
        name = flag.replace("_", "-")
        words = " ".join([flag, *values])
        if name == "--tokenizer-type":
            values = [RENAMED.get(value, value) for value in values]
        if name in WITHOUT_EFFECT and tuple(values) == WITHOUT_EFFECT[name]:
            dropped.append(words)
        elif name in REFUSED:
            raise ConfigError(f"{words}: {REFUSED[name]}")
        else:
            kept += [RENAMED.get(name, flag), *values]
    if dropped:
        print(f"without effect here: {', '.join(dropped)}", file=sys.stderr)
    return kept


def _grouped(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values behind it; `--x=1` stays one word unless the flag is Megatron-LM's alone."""
    groups: list[tuple[str, list[str]]] = []
    for word in flags:
        if not word.startswith("--") and groups:
            groups[-1][1].append(word)
            continue
        flag, equals, value = word.partition("=")
        foreign = equals and flag.replace("_", "-") in {*REFUSED, *RENAMED}
        groups.append((flag, [value]) if foreign else (word, []))
    return groups
