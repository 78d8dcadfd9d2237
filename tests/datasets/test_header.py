"""The JSON beside a token file, and the check of the tokenizer against it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_core.datasets import DatasetHeader, check_tokenizer, read_header, write_header
from megatron_core.errors import DataError
from megatron_core.tokenizers import ByteLevelTokenizer, NullTokenizer

BYTES = ByteLevelTokenizer()
HEADER = DatasetHeader(
    tokenizer_type="ByteLevelTokenizer",
    fingerprint=BYTES.fingerprint(),
    vocab_size=257,
    eod=256,
    append_eod=True,
    documents=3,
    tokens=40,
)


def test_round_trip(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    assert read_header(prefix) is None
    write_header(prefix, HEADER)
    assert read_header(prefix) == HEADER
    write_header(prefix, replace(HEADER, eod=None))
    assert read_header(prefix).eod is None
    check_tokenizer(prefix, BYTES)


def test_without_header_nothing_is_checked(tmp_path: Path) -> None:
    check_tokenizer(str(tmp_path / "a"), BYTES)
    (tmp_path / "b.json").write_text("not ours")
    check_tokenizer(str(tmp_path / "b"), BYTES)


def test_another_tokenizer_is_told(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    write_header(prefix, HEADER)
    with pytest.raises(DataError, match="ByteLevelTokenizer of 257 tokens, and the tokenizer of this run has 12"):
        check_tokenizer(prefix, NullTokenizer(12))
    with pytest.raises(DataError, match=r"made with another ByteLevelTokenizer: fingerprint .*--tokenizer-model"):
        check_tokenizer(prefix, NullTokenizer(257))


def test_a_file_of_someone_else_is_kept(tmp_path: Path) -> None:
    foreign = tmp_path / "a.json"
    foreign.write_text("[1]")
    with pytest.raises(DataError, match=r"a\.json exists and is no header"):
        write_header(str(tmp_path / "a"), HEADER)
    assert foreign.read_text() == "[1]"


def test_a_header_that_lacks_a_field(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    write_header(prefix, HEADER)
    content = json.loads((tmp_path / "a.json").read_text())
    del content["eod"]
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"a\.json lacks a field .*eod"):
        read_header(prefix)
