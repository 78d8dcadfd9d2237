"""Small corpora in every format, runs over them, and the expected results from the definition."""

import gzip
import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zstandard

from megatron_core.preprocess import Limits, PreprocessSettings, preprocess
from megatron_core.tokenizers import Tokenizer

# So small that a corpus of some kilobytes gives many parts and batches.
SMALL = Limits(part_bytes=700, batch_bytes=150, save_seconds=0.0)


def texts(count: int) -> list[str]:
    """Texts of many lengths, including empty ones and other scripts."""
    words = ["", "one", "two words", "Gr\u00fc\u00dfe \u4e16\u754c \U0001f642", "a line\nand another", "x" * 400]
    return [words[n % 6] and f"{n} {words[n % 6]} {'y' * (n * 7 % 50)}" for n in range(count)]


def write_jsonl(path: Path, documents: Sequence[str], key: str = "text") -> Path:
    """A JSON Lines file, compressed according to its suffix."""
    data = "".join(json.dumps({"n": 1, key: text}) + "\n" for text in documents).encode()
    return write_packed(path, data)


def write_packed(path: Path, data: bytes) -> Path:
    """A file with the content, compressed in two members or frames according to its suffix."""
    half = len(data) // 3
    if path.suffix == ".gz":
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])
    elif path.suffix == ".zst":
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path.write_bytes(data)
    return path


def settings(folder: Path, **changes: object) -> PreprocessSettings:
    """Settings for all .jsonl files of the folder, compared byte by byte."""
    given: dict = {
        "input": (str(folder / "*.jsonl"),),
        "output_prefix": str(folder / "out"),
        "tokenizer_type": "ByteLevelTokenizer",
        "workers": 2,
        "overwrite": True,
    }
    return PreprocessSettings(**{**given, **changes})


def outcome(folder: Path, limits: Limits = SMALL, **changes: object) -> dict[str, bytes]:
    """The output files of a run, by the ends of their names."""
    given = settings(folder, **changes)
    preprocess(given, limits)
    prefix = Path(given.output_prefix)
    written = {path.name: path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}_*")}
    assert not [name for name in written if name.endswith(".partial")] and not Path(f"{prefix}.work").exists()
    return {name.removeprefix(prefix.name): data for name, data in written.items()}


def sequences(tokenizer: Tokenizer, documents: Sequence[str], eod: bool) -> tuple[list[list[int]], list[int]]:
    """The expected sequences and document index of documents."""
    found, index = [], [0]
    for text in documents:
        ids = tokenizer.tokenize(text)
        if ids:
            found.append([*ids, tokenizer.eod] if eod else ids)
        index.append(len(found))
    return found, index


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limits the size of this process's files, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so writing further gives EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
