"""Small corpora in every form, runs over them, and what must come out, from the definition."""

import gzip
import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zstandard

from megatron_core.preprocess import Limits, PreprocessSettings, preprocess
from megatron_core.tokenizers import Tokenizer

# So small that a corpus of some kilobytes is many parts and many batches.
SMALL = Limits(part_bytes=700, batch_bytes=150, save_seconds=0.0)


def texts(count: int) -> list[str]:
    """Texts of many lengths, empty ones and other scripts among them."""
    words = ["", "one", "two words", "Gr\u00fc\u00dfe \u4e16\u754c \U0001f642", "a line\nand another", "x" * 400]
    return [words[n % 6] and f"{n} {words[n % 6]} {'y' * (n * 7 % 50)}" for n in range(count)]


def write_jsonl(path: Path, documents: Sequence[str], key: str = "text") -> Path:
    """A JSON Lines file, packed as its suffix says."""
    data = "".join(json.dumps({"n": 1, key: text}) + "\n" for text in documents).encode()
    return write_packed(path, data)


def write_packed(path: Path, data: bytes) -> Path:
    """A file with the content, packed in two members or frames if its suffix says so."""
    half = len(data) // 3
    if path.suffix == ".gz":
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])
    elif path.suffix == ".zst":
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path.write_bytes(data)
    return path


def settings(folder: Path, **changes: object) -> PreprocessSettings:
    """Settings for all .jsonl files of the folder, read byte by byte."""
    given: dict = {
        "input": (str(folder / "*.jsonl"),),
        "output_prefix": str(folder / "out"),
        "tokenizer_type": "ByteLevelTokenizer",
        "workers": 2,
        "overwrite": True,
    }
    return PreprocessSettings(**{**given, **changes})


def outcome(folder: Path, limits: Limits = SMALL, **changes: object) -> dict[str, bytes]:
    """The files that a run writes, by the ends of their names."""
    given = settings(folder, **changes)
    preprocess(given, limits)
    prefix = Path(given.output_prefix)
    written = {path.name: path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}_*")}
    assert not [name for name in written if name.endswith(".partial")] and not Path(f"{prefix}.work").exists()
    return {name.removeprefix(prefix.name): data for name, data in written.items()}


def sequences(tokenizer: Tokenizer, documents: Sequence[str], eod: bool) -> tuple[list[list[int]], list[int]]:
    """The sequences and the document index that documents must become."""
    found, index = [], [0]
    for text in documents:
        ids = tokenizer.tokenize(text)
        if ids:
            found.append([*ids, tokenizer.eod] if eod else ids)
        index.append(len(found))
    return found, index


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond some bytes: as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ: writing on gives EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
