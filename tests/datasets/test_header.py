"""The JSON header of a token file, and the check of the tokenizer against it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_core.datasets import DatasetHeader, check_tokenizer, read_header
from megatron_core.errors import DataError
from megatron_core.preprocess.builder import write_header
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
    bos=None,
    eos=256,
    pad=None,
)


def test_round_trip(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    assert read_header(prefix) is None
    write_header(prefix, HEADER)
    assert read_header(prefix) == HEADER
    write_header(prefix, replace(HEADER, eod=None, append_eod=False))
    assert read_header(prefix).eod is None
    check_tokenizer(prefix, BYTES)


def test_without_header_nothing_is_checked(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("not ours")
    for prefix in (str(tmp_path / "a"), str(tmp_path / "b")):
        assert read_header(prefix) is None
        check_tokenizer(prefix, BYTES)


def test_another_tokenizer_is_told(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    write_header(prefix, HEADER)
    with pytest.raises(DataError, match="ByteLevelTokenizer of 257 tokens, but the tokenizer of this run has 12"):
        check_tokenizer(prefix, NullTokenizer(12))
    with pytest.raises(DataError, match=r"made with another ByteLevelTokenizer: fingerprint .*--tokenizer-model"):
        check_tokenizer(prefix, NullTokenizer(257))


def test_a_file_of_someone_else_is_kept(tmp_path: Path) -> None:
    foreign = tmp_path / "a.json"
    foreign.write_text("[1]")
    with pytest.raises(DataError, match=r"a\.json exists and is not the header"):
        write_header(str(tmp_path / "a"), HEADER)
    assert foreign.read_text() == "[1]"


@pytest.mark.parametrize("content", ["[1]", "{", "[" * 50_000, '{"format": "megatron-netive token file 2"}'])
def test_a_header_that_cannot_be_used_is_told(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(content)
    for _ in range(2):
        assert read_header(str(tmp_path / "a")) is None
    assert capsys.readouterr().err.count("a.json is not the header of a token file") == 1


def test_a_header_that_lacks_a_field(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    write_header(prefix, HEADER)
    content = json.loads((tmp_path / "a.json").read_text())
    del content["eod"]
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"a\.json has missing or unexpected fields .*eod"):
        read_header(prefix)


def test_the_header_of_a_tokenizer() -> None:
    header = DatasetHeader.of(BYTES, "ByteLevelTokenizer", append_eod=True, documents=3, tokens=40)
    assert header == HEADER
    null = DatasetHeader.of(NullTokenizer(5), "NullTokenizer", append_eod=False, documents=1, tokens=2)
    assert (null.eod, null.bos, null.eos, null.pad, null.vocab_size) == (4, None, None, None, 5)


def write_content(folder: Path, **changes: object) -> str:
    """A header with changed content; returns the prefix."""
    content = {"format": "megatron-native token file 2", **asdict(HEADER), **changes}
    (folder / "a.json").write_text(json.dumps(content))
    return str(folder / "a")


def test_a_header_of_version_1_is_read(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    old = asdict(HEADER)
    for name in ("bos", "eos", "pad"):
        del old[name]
    (tmp_path / "a.json").write_text(json.dumps({"format": "megatron-native token file 1", **old}))
    assert read_header(prefix) == replace(HEADER, bos=None, eos=None, pad=None)
    check_tokenizer(prefix, BYTES)
    # Fields that it does not have are not compared.
    with pytest.raises(DataError, match=r"this run has 12 \(eod 256 there and 11 here\); use"):
        check_tokenizer(prefix, NullTokenizer(12))
    write_header(prefix, read_header(prefix))
    assert json.loads((tmp_path / "a.json").read_text())["format"] == "megatron-native token file 2"


def test_a_header_of_a_later_version_is_told(tmp_path: Path) -> None:
    prefix = write_content(tmp_path, format="megatron-native token file 3")
    with pytest.raises(DataError, match=r"a\.json has the format .* file 3', expected one of .*file 1'.*"):
        read_header(prefix)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": "257"}, r"a\.json has vocab_size='257', expected int; prepare the data again, or remove"),
        ({"eod": 1.5}, r"eod=1\.5, expected int \| None"),
        ({"documents": True}, r"documents=True, expected int"),
        ({"append_eod": 1}, r"append_eod=1, expected bool"),
        ({"extra": 1}, r"a\.json has missing or unexpected fields \(.*extra"),
    ],
)
def test_a_header_with_a_field_of_another_type(changes: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        read_header(write_content(tmp_path, **changes))


def test_special_ids_that_differ_are_named(tmp_path: Path) -> None:
    prefix = write_content(tmp_path, vocab_size=12, pad=7)
    with pytest.raises(
        DataError,
        match=r"another ByteLevelTokenizer.* \(eod 256 there and 11 here, eos 256 .* None here, pad 7 .*\); use",
    ):
        check_tokenizer(prefix, NullTokenizer(12))


def test_another_end_of_document_is_told_although_the_vocabulary_is_the_same(tmp_path: Path) -> None:
    """As if the tokenizer_config.json with the end token were missing: the data's ends would be ordinary tokens."""
    other = ByteLevelTokenizer()
    other.eod = 10
    with pytest.raises(DataError, match=r"documents of .*a end with the id 256, but .* ends them with 10"):
        check_tokenizer(write_content(tmp_path), other)
    check_tokenizer(write_content(tmp_path, append_eod=False), other)
    other.eod, other.pad, other.bos = 256, 3, 4
    check_tokenizer(write_content(tmp_path), other)


def test_a_large_file_of_the_same_name_is_not_read(tmp_path: Path) -> None:
    write_content(tmp_path, tokenizer_type="x" * 70_000)
    assert read_header(str(tmp_path / "a")) is None
    (tmp_path / "a.json").write_bytes(b"")
    assert read_header(str(tmp_path / "a")) is None
