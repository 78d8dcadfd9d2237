"""Settings of a preprocessing run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_core.errors import ConfigError
from megatron_core.output_file import refuse_url
from megatron_core.preprocess.backends import BACKENDS
from megatron_core.tokenizers.build import NUM_SPECIAL_TOKENS, TokenizerFiles


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """Turn text into token files."""

    input: tuple[str, ...]
    """Files, folders, or globs in quotes, also in object storage (s3://bucket/texts/*.jsonl); by their suffixes JSON
    Lines (.jsonl, .json), Parquet (.parquet), or plain text (all others), each also packed (.gz, .zst)."""
    output_prefix: str
    """Where to write: PREFIX_KEY_document.bin, .idx and .json (with --split-sentences PREFIX_KEY_sentence)."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys (columns of Parquet) that hold the text; each gets files of its own."""
    tokenizer_type: str = "HuggingFaceTokenizer"
    """Kind of tokenizer, by Megatron's name: HuggingFaceTokenizer, GPT2BPETokenizer, SentencePieceTokenizer,
    Llama2Tokenizer, TikTokenizer, ByteLevelTokenizer or NullTokenizer."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer."""
    vocab_file: str | None = None
    """Vocabulary file of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges file of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Vocabulary size of NullTokenizer; of TikTokenizer, how many entries of its file are used."""
    tiktoken_pattern: str | None = None
    """How TikTokenizer splits text into words: v1, v2 or a regular expression."""
    tiktoken_num_special_tokens: int = NUM_SPECIAL_TOKENS
    """TikTokenizer: number of the first ids that are reserved for special tokens."""
    append_eod: bool = False
    """Put the end-of-document id after every document."""
    split_sentences: bool = False
    """Make a sequence of each sentence (needs the package nltk)."""
    keep_newlines: bool = False
    """With --split-sentences, keep the white space that follows a sentence."""
    document_separator: str | None = None
    r"""Text between the documents of a plain text file, with \n and \t for a newline and a tab; without it each file is
    one document."""
    overwrite: bool = False
    """Replace token files of an earlier run; without it they are an error."""
    strict: bool = False
    """Stop at the first broken document instead of leaving broken ones out."""
    skip_damaged_files: bool = False
    """Leave out files that cannot be read to their end, and name them, instead of stopping at the first one."""
    tokenization_backend: Literal["auto", "tokenizers", "gigatoken"] = "auto"
    """tokenizers, gigatoken (an optional package, many times faster), or auto: gigatoken if it is installed and gives
    the same tokens."""
    workers: int | None = None
    """Processes that read and tokenize; default: one per core."""
    partitions: int = 1
    """Accepted for compatibility with Megatron-LM, without effect: the input is always divided among the workers."""
    keep_sequential_samples: bool = False
    """Accepted for compatibility with Megatron-LM, without effect: documents always keep their order."""
    engine: Literal["local", "ray"] = "local"
    """local: the workers are processes of this machine; ray: tasks of a Ray cluster (needs the package ray), which
    write parts to PREFIX.parts on a file system that all hosts share."""
    partition: str | None = None
    """I/N: write only the I-th of N shares of the parts, I from 1 to N, to PREFIX.parts; for job arrays."""
    join_partitions: bool = False
    """Join the parts that all partitions have written."""
    keep_parts: bool = False
    """With --engine ray or --join-partitions: keep the parts as the result, and write PREFIX_KEY_document.parts.json,
    which lists them, instead of copying them into one pair."""
    part_mebibytes: int = 256
    """MiB of input for a part, the unit that is computed again after a failure; a packed file is one
    part."""
    log_interval: int = 1000
    """Documents between updates of the progress, which is shown twice a second at most."""

    @property
    def processes(self) -> int:
        """Number of workers."""
        return self.workers if self.workers is not None else available_cores()

    @property
    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer of the flags."""
        return TokenizerFiles.of(self.tokenizer_type, self)

    @property
    def separator(self) -> str | None:
        r"""The document separator, with \n and \t replaced by a newline and a tab."""
        return self.document_separator and self.document_separator.replace("\\n", "\n").replace("\\t", "\t")

    @property
    def key_names(self) -> list[str]:
        """The end of the name of each key's files, such as text_document."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{key}_{level}" for key in self.json_keys]

    @property
    def prefixes(self) -> list[str]:
        """The path prefix of each key's files."""
        return [f"{self.output_prefix}_{name}" for name in self.key_names]

    @property
    def in_parts(self) -> bool:
        """Whether the tokens are read from parts, which other processes write."""
        return self.engine == "ray" or self.join_partitions

    @property
    def part_bytes(self) -> int:
        """Bytes of input for a part."""
        return self.part_mebibytes << 20

    @property
    def share(self) -> tuple[int, int]:
        """I and N of --partition I/N; (0, 0) without the flag. ValueError: malformed."""
        return (0, 0) if self.partition is None else parse_share(self.partition)


def parse_share(text: str) -> tuple[int, int]:
    """I and N of I/N. ValueError: malformed."""
    number, total = map(int, text.split("/"))
    if not 1 <= number <= total:
        raise ValueError
    return number, total


@dataclass(frozen=True)
class Limits:
    """Limits of memory, in bytes of uncompressed input, and the interval between saves of the progress.

    part_bytes: text of a worker's task. batch_bytes: text that is read and tokenized in one batch. document_bytes:
    longest document. save_seconds: time between two saves of the progress.
    """

    # With gigatoken a task of 4 MiB takes 40 ms, including half a millisecond for messages.
    part_bytes: int = 4 << 20
    # Sizes from 1/8 to 1/2 MiB are equally fast; 1 MiB takes 5% longer, as it touches new memory.
    batch_bytes: int = 1 << 18
    document_bytes: int = 256 << 20
    save_seconds: float = 2.0


MOST = {"processes": 1024, "log_interval": 2**63 - 1, "part_mebibytes": 2**20}
"""Largest values of settings."""


def available_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_preprocessing(settings: PreprocessSettings) -> None:
    """Raise ConfigError for settings that are invalid or contradict each other, before any file is opened."""
    for name in MOST:
        if not 1 <= getattr(settings, name) <= MOST[name]:
            flag = "workers" if name == "processes" else name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(settings, name)} must be at least 1, and at most {MOST[name]:,}")
    if settings.tokenization_backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ConfigError(f"--tokenization-backend {settings.tokenization_backend} is unknown; legal: {known}")
    if settings.document_separator == "":
        raise ConfigError("--document-separator is empty; remove it to make each file one document")
    if settings.keep_newlines and not settings.split_sentences:
        raise ConfigError("--keep-newlines has an effect only with --split-sentences; give both or neither")
    refuse_url(f"--output-prefix {settings.output_prefix}", settings.output_prefix)
    _check_keys(settings.json_keys)
    _check_parts(settings)


def _check_parts(settings: PreprocessSettings) -> None:
    try:
        share = settings.share
    except ValueError:
        raise ConfigError(f"--partition {settings.partition} must be I/N with 1 <= I <= N, such as 3/8") from None
    chosen = {
        "--engine ray": settings.engine == "ray",
        "--partition": share != (0, 0),
        "--join-partitions": settings.join_partitions,
    }
    flags = [flag for flag, is_given in chosen.items() if is_given]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} exclude each other; give one of them")
    if settings.keep_parts and not settings.in_parts:
        raise ConfigError("--keep-parts has an effect only with --engine ray or --join-partitions; add one of them")


def _check_keys(keys: Sequence[str]) -> None:
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--json-keys {' '.join(keys)} names a key twice; give it once")
    if not keys:
        raise ConfigError("--json-keys is empty; give the key of the text")
    if bad := [key for key in keys if "/" in key]:
        raise ConfigError(f"--json-keys {bad[0]} cannot be part of a file name; rename the key in the data")
