"""The command line from text to token files."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import IndexedDataset, read_header
from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess import preprocess
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from tests.preprocess.corpora import settings, texts, write_jsonl
from tests.programs import run_program
from tests.vocabularies.corpus import TEXTS, write_tokenizer_json

ROOT = Path(__file__).parents[2]


run = partial(run_program, "tools/preprocess_data.py")


def start(*flags: object, stderr: int) -> subprocess.CompletedProcess:
    """Run the tool like a user."""
    command = [sys.executable, "tools/preprocess_data.py", *map(str, flags)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_command_line(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write_tokenizer_json(tmp_path))
    corpus = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    done = run(
        "--input", corpus, "--output-prefix", tmp_path / "new" / "out", "--keep-sequential-samples",
        "--tokenizer_type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path, "--append-eod", "--partitions", 2,
        "--dataset-impl", "mmap",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(str(tmp_path / "new" / "out_text_document"))
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS if text]
    assert [sequence.tolist() for sequence in dataset[:]] == expected
    # The empty text is a document without sequences, as in Megatron.
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 3, 4]
    assert dataset.dtype is np.uint16
    header = read_header(dataset.path_prefix)
    assert header.fingerprint == tokenizer.fingerprint() and header.append_eod
    assert (header.documents, header.tokens) == (len(TEXTS), dataset.num_tokens)
    assert f"{len(TEXTS)} documents, {dataset.num_tokens:,} tokens" in done.stdout
    assert "0 broken documents omitted, 1 empty text kept" in done.stdout and "MB/s" in done.stdout
    assert "tokenization backend: " in done.stderr


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", texts(500))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 200, 0, 0))
    flags = ("--input", corpus, "--output-prefix", tmp_path / "out", "--tokenizer-type", "ByteLevelTokenizer")
    assert start(*flags, stderr=theirs).returncode == 0
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "B/s" in shown and "documents/s" in shown and "tokens" in shown


def test_errors_are_one_line(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", ["a"])
    done = run("--input", corpus, "--output-prefix", tmp_path / "out")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("preprocess_data: --tokenizer-type HuggingFaceTokenizer needs --tokenizer-model")
    assert done.stderr.count("\n") == 1
    done = run("--input", corpus, "--output-prefix", tmp_path / "out", "--max-documents", 5)
    assert done.returncode == 1 and done.stderr.startswith("preprocess_data: --max-documents 5: all documents are")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    help_text = run("--help").stdout
    assert "--append-eod" in help_text and "--no-append-eod" not in help_text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": 0}, "--workers 0 must be at least 1"),
        ({"log_interval": 0}, "--log-interval 0 must be at least 1"),
        ({"json_keys": ("a", "a")}, "--json-keys a a names a key twice"),
        ({"json_keys": ()}, "--json-keys is empty"),
        ({"json_keys": ("a/b",)}, "--json-keys a/b cannot be part of a file name"),
        ({"document_separator": ""}, "--document-separator is empty"),
        ({"keep_newlines": True}, "--keep-newlines has an effect only with --split-sentences"),
    ],
)
def test_settings_that_cannot_be_honoured(changes: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        preprocess(settings(tmp_path, **changes))


def test_append_eod_needs_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", ["a"])
    model = write_tokenizer_json(tmp_path, ("<other>",))
    changes = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model), "append_eod": True}
    with pytest.raises(ConfigError, match="--append-eod: the tokenizer has no end-of-document token"):
        preprocess(settings(tmp_path, **changes))
    assert not list(tmp_path.glob("out*"))


def test_inputs_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file has that name"):
        preprocess(settings(tmp_path))
    with pytest.raises(DataError, match="--input names no file"):
        preprocess(settings(tmp_path, input=()))
    hint = "is there text under --json-keys"
    for content, why in (('{"text": ""}\n', hint), ("", hint), ("{\n", "1 broken document omitted; the first")):
        (tmp_path / "corpus.jsonl").write_text(content)
        with pytest.raises(DataError, match=f"the input has no tokens; {why}"):
            preprocess(settings(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_foreign_json_file_is_told_before_the_work(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", ["a"])
    (tmp_path / "out_text_document.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="is not the header of a token file"):
        preprocess(settings(tmp_path))
    assert not (tmp_path / "out_text_document.bin").exists()
