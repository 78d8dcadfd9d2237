r"""Turn JSON Lines text into token files that training reads.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod

Writes corpus_text_document.bin and .idx, byte for byte as Megatron's, and a .json that names the tokenizer.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from megatron_core.datasets import (
    DatasetHeader,
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
    write_header,
)
from megatron_core.datasets.header import check_header_path
from megatron_core.datasets.jsonl import Chunk, find_inputs, read_chunks, texts_of
from megatron_core.errors import ConfigError, DataError, MegatronError
from megatron_core.tokenizers import Tokenizer, build_tokenizer

# Large enough that handing a chunk to another process costs little beside its tokenization, small enough that
# a few for each worker fit in memory.
CHUNK_BYTES = 2 << 20
CHUNKS_AHEAD = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Turn JSON Lines text into token files."""

    input: tuple[str, ...]
    """JSON Lines files, or globs in quotes."""
    output_prefix: str
    """Where to write: PREFIX_KEY_document.bin, .idx and .json."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys that hold the text; each gets files of its own."""
    tokenizer_type: str = "HuggingFaceTokenizer"
    """Kind of tokenizer, by Megatron's name."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer."""
    vocab_file: str | None = None
    """Vocabulary file of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges file of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Vocabulary size of NullTokenizer."""
    append_eod: bool = False
    """Put the end-of-document id after every document."""
    workers: int = 1
    """Processes. One is enough for HuggingFaceTokenizer and GPT2BPETokenizer: it uses all cores by itself."""
    log_interval: int = 1000
    """Documents between updates of the documents per second."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the flags."""
        return build_tokenizer(
            self.tokenizer_type, self.tokenizer_model, self.vocab_file, self.merge_file, self.vocab_size
        )


@dataclass(frozen=True)
class Encoded:
    """The tokens of a chunk: one array for each key, and the documents' lengths in it."""

    size: int
    tokens: tuple[np.ndarray, ...]
    lengths: tuple[tuple[int, ...], ...]


def encode(settings: Settings, chunk: Chunk) -> Encoded:
    """Tokenize the documents of a chunk, in this process or in a worker."""
    tokenizer = loaded(settings)
    documents = texts_of(chunk, settings.json_keys)
    tokens, lengths = [], []
    for texts in zip(*documents, strict=True) if documents else ((),) * len(settings.json_keys):
        ids = tokenizer.tokenize_batch(texts)
        if settings.append_eod:
            # As Megatron: an empty text stays an empty document.
            ids = [[*document, tokenizer.eod] if document else document for document in ids]
        tokens.append(np.array(list(chain.from_iterable(ids)), dtype=np.int64))
        lengths.append(tuple(len(document) for document in ids))
    return Encoded(chunk.size, tuple(tokens), tuple(lengths))


@lru_cache(maxsize=1)
def loaded(settings: Settings) -> Tokenizer:
    """The tokenizer, loaded once in each process."""
    return settings.tokenizer()


def one_thread() -> None:
    """Keep a worker to its own core: the tokenizers library would take all of them in each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def encode_all(settings: Settings, chunks: Iterable[Chunk]) -> Iterator[Encoded]:
    """Every chunk's tokens, in the order of the chunks whatever the number of workers."""
    if settings.workers == 1:
        yield from (encode(settings, chunk) for chunk in chunks)
        return
    # Started afresh, not forked: the tokenizers library has threads, and a fork would lose them.
    pool = ProcessPoolExecutor(settings.workers, mp_context=get_context("spawn"), initializer=one_thread)
    try:
        # A bounded queue: without a bound the corpus would sit in memory when writing is slower than reading.
        pending = deque()
        for chunk in chunks:
            pending.append(pool.submit(encode, settings, chunk))
            if len(pending) > CHUNKS_AHEAD * settings.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died, perhaps for lack of memory; lower --workers {settings.workers}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def check(settings: Settings, tokenizer: Tokenizer, prefixes: Sequence[str]) -> None:
    """ConfigError or DataError for flags that cannot be honoured, before any text is read."""
    for name in ("workers", "log_interval"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(settings, name)} must be at least 1")
    if len(set(settings.json_keys)) < len(settings.json_keys):
        raise ConfigError(f"--json-keys {' '.join(settings.json_keys)} names a key twice; once is enough")
    if not settings.json_keys:
        raise ConfigError("--json-keys is empty; name the key that holds the text")
    for prefix in prefixes:
        check_header_path(prefix)
    if settings.append_eod and tokenizer.eod is None:
        raise ConfigError("--append-eod: the tokenizer has no end-of-document token; leave the flag out")


def preprocess(settings: Settings) -> None:
    """Read, tokenize and write; nothing has its final name before all of it is there."""
    tokenizer = loaded(settings)
    prefixes = [f"{settings.output_prefix}_{key}_document" for key in settings.json_keys]
    check(settings, tokenizer, prefixes)
    paths = find_inputs(settings.input)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(get_bin_path(p), dtype)) for p in prefixes]
        fill(settings, builders, paths)
        if not any(builder.num_tokens for builder in builders):
            raise DataError(f"--input {' '.join(settings.input)}: no token in it; is there text under --json-keys?")
        for prefix, builder in zip(prefixes, builders, strict=True):
            finish(settings, tokenizer, prefix, builder)


def fill(settings: Settings, builders: Sequence[IndexedDatasetBuilder], paths: Sequence[Path]) -> None:
    """Append every document of the files to the builder of each key, with a progress bar."""
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, unit="B", unit_scale=True, mininterval=0.5) as bar:
        progress = Progress(bar, settings.log_interval)
        for encoded in encode_all(settings, read_chunks(paths, CHUNK_BYTES)):
            for builder, tokens, lengths in zip(builders, encoded.tokens, encoded.lengths, strict=True):
                append(builder, tokens, lengths)
            progress.update(encoded.size, builders[0].num_documents)


def append(builder: IndexedDatasetBuilder, tokens: np.ndarray, lengths: tuple[int, ...]) -> None:
    """Append documents of one sequence each; an empty one is a document of none, as Megatron writes it."""
    start = 0
    for length in lengths:
        builder.add_document(tokens[start : start + length], [length] if length else [])
        start += length


def finish(settings: Settings, tokenizer: Tokenizer, prefix: str, builder: IndexedDatasetBuilder) -> None:
    """Name the files, write the header beside them and say what was made."""
    header = DatasetHeader(
        tokenizer_type=settings.tokenizer_type,
        fingerprint=tokenizer.fingerprint(),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        append_eod=settings.append_eod,
        documents=builder.num_documents,
        tokens=builder.num_tokens,
    )
    builder.finalize(get_idx_path(prefix))
    write_header(prefix, header)
    print(f"{prefix}: {header.documents:,} documents, {header.tokens:,} tokens", flush=True)


class Progress:
    """The bar's bytes per second, and documents per second beside it."""

    def __init__(self, bar: tqdm, log_interval: int) -> None:
        self._bar = bar
        self._interval = log_interval
        self._start = time.perf_counter()
        self._next = log_interval

    def update(self, size: int, documents: int) -> None:
        """Count the bytes just done, and the documents done up to now."""
        self._bar.update(size)
        if documents >= self._next:
            self._next = documents + self._interval
            rate = documents / (time.perf_counter() - self._start)
            self._bar.set_postfix_str(f"{documents:,} documents, {rate:,.0f} documents/s", refresh=False)


def main() -> None:
    """Parse the flags and run; one line on stderr and status 1 for an error that has a way out."""
    settings = tyro.cli(Settings, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    try:
        preprocess(settings)
    except (MegatronError, OSError) as error:
        sys.exit(f"preprocess_data: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
