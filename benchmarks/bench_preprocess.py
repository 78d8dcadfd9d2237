"""Compare preprocessing with tokenization only, on 50 MB of JSON Lines and a byte-level BPE of 16,000 entries.

Backend only: it loads the tokenizer and encodes the list of all texts with its own threads, in a new process each time;
"loaded" excludes loading. Preprocessed: tools/preprocess_data.py from the start of its work to the published files,
including workers, loading, reading and writing; "process" adds Python's start and imports. Speeds are MB of text per
second, medians; ratio in benchmarks/results.csv is relative to the backend only.

    python -m benchmarks.bench_preprocess
    python -m benchmarks.bench_preprocess --corpus corpus.jsonl --tokenizer tokenizer.json
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from random import Random

import tyro
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.results import Row, append
from megatron_core.datasets import get_bin_path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of preprocessing and of its backend."""

    corpus: str | None = None
    """JSON Lines with the key text; created from Python sources unless given."""
    tokenizer: str | None = None
    """A tokenizer.json; trained on the corpus unless given."""
    megabytes: int = 50
    """Size of the created corpus."""
    vocab_size: int = 16_000
    """Vocabulary size of the trained tokenizer."""
    workers: int = 2
    """Worker processes."""
    repeats: int = 15
    """Number of measurements, whose median is reported."""


def make_corpus(path: Path, size: int) -> Path:
    """Python sources of the standard library and of installed packages, in random order."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    sources = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    Random(0).shuffle(sources)
    seen: set[str] = set()
    with path.open("w", encoding="utf-8") as file:
        for source in sources:
            text = source.read_text(encoding="utf-8", errors="replace")
            if text not in seen:
                seen.add(text)
                file.write(json.dumps({"text": text}) + "\n")
            if file.tell() > size:
                break
    return path


def train(path: Path, texts: list[str], vocab_size: int) -> Path:
    """A byte-level BPE, trained on a third of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[::3], trainer)
    tokenizer.save(str(path))
    return path


def read_texts(corpus: Path) -> list[str]:
    """The texts of the corpus."""
    with corpus.open("rb") as file:
        return [json.loads(line)["text"] for line in file if line.strip()]


def gigatoken_seconds(corpus: Path, tokenizer: Path) -> tuple[float, float]:
    """Seconds of gigatoken to load the tokenizer and encode all texts, and of encoding only."""
    import awkward  # noqa: F401  # the type of gigatoken's result; its import is not part of tokenization
    import gigatoken

    texts = read_texts(corpus)
    began = time.perf_counter()
    fresh = gigatoken.Tokenizer(str(tokenizer))
    loaded = time.perf_counter()
    fresh.encode_batch(texts, parallel=True)
    return time.perf_counter() - began, time.perf_counter() - loaded


def tokenizers_seconds(corpus: Path, tokenizer: Path) -> tuple[float, float]:
    """Seconds of the tokenizers library to load the tokenizer and encode all texts, and of encoding only."""
    texts = read_texts(corpus)
    began = time.perf_counter()
    fresh = Tokenizer.from_file(str(tokenizer))
    loaded = time.perf_counter()
    fresh.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - began, time.perf_counter() - loaded


def alone(measure: Callable[[Path, Path], tuple[float, float]], corpus: Path, tokenizer: Path) -> tuple[float, float]:
    """A measurement in a new process, without warm caches."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, corpus, tokenizer).result()


def preprocessing_seconds(settings: Settings, corpus: Path, tokenizer: Path, backend: str) -> tuple[float, float]:
    """Seconds from the tool's own report, and of its whole process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
        command += ["--input", str(corpus), "--output-prefix", f"{folder}/out", "--tokenizer-model", str(tokenizer)]
        command += ["--append-eod", "--workers", str(settings.workers), "--tokenization-backend", backend]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - began
        assert Path(get_bin_path(f"{folder}/out_text_document")).stat().st_size
        return float(re.search(r"MB in ([\d.]+) s", done.stdout)[1]), seconds


def compare(settings: Settings, corpus: Path, tokenizer: Path, backend: str) -> list[Row]:
    """Measure backend and preprocessing alternately, print, and return the rows."""
    size = sum(len(text.encode()) for text in read_texts(corpus)) / 1e6
    measure = gigatoken_seconds if backend == "gigatoken" else tokenizers_seconds
    # Alternately, so that other load affects all of them.
    turns = [
        alone(measure, corpus, tokenizer) + preprocessing_seconds(settings, corpus, tokenizer, backend)
        for _ in range(settings.repeats)
    ]
    medians = [statistics.median(seconds) for seconds in zip(*turns, strict=True)]
    names = (
        f"{backend} alone",
        f"{backend} alone, loaded",
        f"preprocessed by {backend}",
        f"preprocessed by {backend}, process",
    )
    rows = []
    for name, seconds in zip(names, medians, strict=True):
        ratio = medians[0] / seconds
        print(f"{name:36}{seconds:8.3f} s{size / seconds:9.1f} MB/s{ratio:8.2f} of {backend} alone", flush=True)
        rows.append(Row(f"{name}, {size:.0f} MB", size / seconds, "MB/s", ratio=ratio))
    return rows


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    peer = f"gigatoken {version('gigatoken')}, tokenizers {version('tokenizers')}"
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(settings.corpus or make_corpus(Path(folder, "corpus.jsonl"), settings.megabytes * 10**6))
        texts = read_texts(corpus)
        tokenizer = Path(settings.tokenizer or train(Path(folder, "tokenizer.json"), texts, settings.vocab_size))
        # A slice is sufficient for the slow backend, whose speed does not depend on the size.
        few = Path(folder, "few.jsonl")
        few.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[: max(1, len(texts) // 5)]))
        rows = compare(settings, corpus, tokenizer, "gigatoken")
        rows += compare(settings, few, tokenizer, "tokenizers")
    print(f"preprocessed by gigatoken {rows[2].value / rows[4].value:.1f} times as fast as tokenizers alone")
    append("bench_preprocess", rows, peer=peer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
