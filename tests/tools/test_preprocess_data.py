"""The command line from JSON Lines to token files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import IndexedDataset, read_header
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import ByteLevelTokenizer, HuggingFaceTokenizer
from tests.tokenizers.corpus import TEXTS, write_tokenizer_json
from tools import preprocess_data
from tools.preprocess_data import Settings, preprocess

ROOT = Path(__file__).parents[2]


def run(*flags: object) -> subprocess.CompletedProcess:
    """The tool, as a user starts it."""
    command = [sys.executable, "tools/preprocess_data.py", *map(str, flags)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def write_lines(path: Path, *documents: dict) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


def settings(folder: Path, **changes: object) -> Settings:
    """Settings for a corpus in the folder, read byte by byte."""
    given = {
        "input": (str(folder / "corpus.jsonl"),),
        "output_prefix": str(folder / "out"),
        "tokenizer_type": "ByteLevelTokenizer",
    }
    return Settings(**{**given, **changes})


def content(prefix: Path) -> list[bytes]:
    """Both files' bytes."""
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def test_command_line(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write_tokenizer_json(tmp_path))
    corpus = write_lines(tmp_path / "corpus.jsonl", *({"text": text, "n": 1} for text in TEXTS))
    done = run(
        "--input", corpus, "--output-prefix", tmp_path / "new" / "out",
        "--tokenizer_type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path, "--append-eod",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(str(tmp_path / "new" / "out_text_document"))
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS if text]
    assert [sequence.tolist() for sequence in dataset[:]] == expected
    # The empty text is a document without sequences, as Megatron writes it.
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 3, 4]
    assert dataset.dtype is np.uint16
    header = read_header(dataset.path_prefix)
    assert header.fingerprint == tokenizer.fingerprint() and header.append_eod
    assert (header.documents, header.tokens) == (len(TEXTS), dataset.num_tokens)
    assert f"{len(TEXTS)} documents, {dataset.num_tokens:,} tokens" in done.stdout
    assert "B/s" in done.stderr


def test_errors_are_one_line(tmp_path: Path) -> None:
    done = run("--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / "out")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("preprocess_data: --tokenizer-type HuggingFaceTokenizer needs --tokenizer-model")
    assert done.stderr.count("\n") == 1
    help_text = run("--help").stdout
    assert "--append-eod" in help_text and "--no-append-eod" not in help_text


def test_workers_keep_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data, "CHUNK_BYTES", 200)
    write_lines(tmp_path / "corpus.jsonl", *({"text": f"{i} " + "x" * (i % 37)} for i in range(300)))
    for workers in (1, 2):
        preprocess(settings(tmp_path, workers=workers, output_prefix=str(tmp_path / f"out{workers}")))
    assert content(tmp_path / "out1_text_document") == content(tmp_path / "out2_text_document")
    first = IndexedDataset(str(tmp_path / "out1_text_document"))[299]
    assert ByteLevelTokenizer().detokenize(first.tolist()) == "299 xxx"


def test_errors_of_workers_name_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data, "CHUNK_BYTES", 100)
    corpus = write_lines(tmp_path / "corpus.jsonl", *({"text": "x" * 30} for i in range(50)))
    with corpus.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 51 is no JSON"):
        preprocess(settings(tmp_path, workers=2))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_globs_and_several_keys(tmp_path: Path) -> None:
    for name in "ba":
        write_lines(tmp_path / f"{name}.jsonl", {"title": name, "text": name * 3})
    preprocess(settings(tmp_path, input=(str(tmp_path / "*.jsonl"),), json_keys=("text", "title")))
    read = {key: IndexedDataset(str(tmp_path / f"out_{key}_document"))[:] for key in ("text", "title")}
    decoded = {key: [bytes(s.tolist()).decode() for s in value] for key, value in read.items()}
    assert decoded == {"text": ["aaa", "bbb"], "title": ["a", "b"]}


def test_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    write_lines(tmp_path / "corpus.jsonl", {"text": "1 69999"})
    preprocess(settings(tmp_path, tokenizer_type="NullTokenizer", vocab_size=70000, append_eod=True))
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.dtype is np.int32 and dataset[0].tolist() == [1, 69999, 69999]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r"corpus\.jsonl, line 3 is no JSON \(.*mend or remove"),
        ("[1]", r"corpus\.jsonl, line 3 holds a list, expected an object"),
        ('{"body": "x"}', r"line 3 has no key 'text'; its keys: body; choose with --json-keys"),
        ('{"text": 5}', r"line 3 has a int under 'text', expected a string"),
        (r'{"text": "\ud800"}', r"line 3 has half of a surrogate pair under 'text'"),
    ],
)
def test_a_broken_line_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=sentence) as caught:
        preprocess(settings(tmp_path))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 1 is no JSON"):
        preprocess(settings(tmp_path))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": 0}, "--workers 0 must be at least 1"),
        ({"log_interval": 0}, "--log-interval 0 must be at least 1"),
        ({"json_keys": ("a", "a")}, "--json-keys a a names a key twice"),
        ({"json_keys": ()}, "--json-keys is empty"),
    ],
)
def test_settings_that_cannot_be_honoured(changes: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        preprocess(settings(tmp_path, **changes))


def test_append_eod_needs_one(tmp_path: Path) -> None:
    model = write_tokenizer_json(tmp_path, ("<other>",))
    changes = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model), "append_eod": True}
    with pytest.raises(ConfigError, match="--append-eod: the tokenizer has no end-of-document token"):
        preprocess(settings(tmp_path, **changes))


def test_inputs_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file has that name"):
        preprocess(settings(tmp_path))
    with pytest.raises(DataError, match="--input names no file"):
        preprocess(settings(tmp_path, input=()))
    write_lines(tmp_path / "corpus.jsonl", {"text": ""})
    with pytest.raises(DataError, match="no token in it"):
        preprocess(settings(tmp_path))
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(DataError, match="no token in it"):
        preprocess(settings(tmp_path))


def test_a_foreign_json_file_is_told_before_the_work(tmp_path: Path) -> None:
    write_lines(tmp_path / "corpus.jsonl", {"text": "a"})
    (tmp_path / "out_text_document.json").write_text("{}")
    with pytest.raises(DataError, match="is no header of a token file"):
        preprocess(settings(tmp_path))
    assert not (tmp_path / "out_text_document.bin").exists()
