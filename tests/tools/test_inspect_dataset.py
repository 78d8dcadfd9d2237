"""Output of the inspection of a token file, and errors about damaged files."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_core.commands.inspect_dataset import InspectDatasetFlags, inspect_dataset, text_bar
from megatron_core.datasets import DatasetHeader, get_bin_path, get_idx_path
from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess.builder import IndexedDatasetBuilder, write_header
from megatron_core.tokenizers import ByteLevelTokenizer
from tests.datasets.files import index_by_hand, write
from tests.programs import run_program
from tests.vocabularies.corpus import write_rank_json

BYTES = {"tokenizer_type": "ByteLevelTokenizer"}
TEXTS = ["the cat", "", "Grüße\n\x1b[31m", "x" * 300]


run = partial(run_program, "tools/inspect_dataset.py")


def make(folder: Path, with_header: bool = True) -> str:
    """Documents of bytes, each with its end; returns the prefix."""
    tokenizer = ByteLevelTokenizer()
    documents = [[*tokenizer.tokenize(text), 256] if text else [] for text in TEXTS]
    prefix = write(folder / "a", documents, np.uint16)
    counts = {"documents": len(documents), "tokens": sum(map(len, documents))}
    if with_header:
        write_header(prefix, DatasetHeader.of(tokenizer, "ByteLevelTokenizer", append_eod=True, **counts))
    return prefix


def shown(capsys: pytest.CaptureFixture[str], prefix: str, **changes: object) -> str:
    """The tool's output."""
    inspect_dataset(InspectDatasetFlags(prefix=prefix, **changes))
    return capsys.readouterr().out


def test_command_line(tmp_path: Path) -> None:
    prefix = make(tmp_path)
    done = run(prefix, "--validate", "--document", -1, 0, "--max-tokens", 100, "--tokenizer-type", "ByteLevelTokenizer")
    assert done.returncode == 0, done.stderr
    for line in (
        "no fault: index complete, 323 token ids up to 256 checked against a vocabulary of 257",
        "documents  4",
        "tokens     323, as uint16 (2 bytes each)",
        f".bin       {Path(prefix + '.bin').stat().st_size:,} bytes",
        f"made by ByteLevelTokenizer ({prefix}.json)",
        "special ids  eod 256, bos none, eos 256, pad none; documents end with eod",
        "shortest 0, median about 8, mean 80.8, 99% up to about 301, longest 301",
        f"document 3 (301 tokens)\n{'x' * 100} ... and 201 more tokens",
        "document 0 (8 tokens)\nthe cat",
    ):
        assert line in done.stdout
    assert done.stdout.index("document 3") < done.stdout.index("document 0 (")


def test_a_fault_ends_with_one_line_and_status_1(tmp_path: Path) -> None:
    prefix = make(tmp_path)
    done = run(prefix, "--validate", "--vocab-size", 256)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith(
        f"inspect_dataset: {prefix}.bin: the token id 256 (sequence 0, token 7, byte 14), expected 0"
    )
    help_text = run("--help").stdout
    assert "PREFIX" in help_text and "--no-validate" not in help_text


def test_a_histogram_of_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, make(tmp_path)).splitlines()
    rows = {line.split("  ")[0].strip() or line.split()[0]: line for line in lines if "%" in line and "█" in line}
    table = [line.strip() for line in lines[lines.index(next(x for x in lines if "of tokens" in x)) + 1 :]]
    assert len(rows) == 3 and len(table) == 10
    assert table[0].startswith("0          1       0.0%  █")
    assert table[4].startswith("8 to 15          2       6.8%  ██")
    assert table[-1].startswith("256 to 511          1      93.2%  █")


def test_bars_show_what_is_not_nothing() -> None:
    assert [text_bar(length) for length in (0, 0.001, 0.5, 1, 2.25)] == ["", "▏", "▌", "█", "██▎"]


def test_samples_come_from_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", [[i, i + 1] for i in range(10)])
    out = shown(capsys, prefix, samples=2)
    assert "document 0 (2 tokens)\n0 1\n" in out and "document 5 (2 tokens)\n5 6\n" in out
    assert out.count("\ndocument ") == 2
    assert shown(capsys, prefix, samples=50).count("\ndocument ") == 10
    assert "no header" in out


def test_text_cannot_rule_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, make(tmp_path), document=(2,), **BYTES)
    assert "Grüße\n\\x1b[31m" in out and "\x1b" not in out


def test_sequences_of_a_document_are_shown_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(get_bin_path(prefix)) as builder:
        builder.add_document([1, 2, 3, 4, 5], [2, 0, 3])
        builder.add_document([], [])
        builder.finalize(get_idx_path(prefix))
    out = shown(capsys, prefix, document=(0, 1), max_tokens=3)
    assert "document 0 (5 tokens)\n1 2 3 ... and 2 more tokens" in out and "document 1 (0 tokens)\n" in out


def test_a_file_that_closes_no_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "a")
    Path(get_bin_path(prefix)).write_bytes(bytes([7, 0, 8, 0]))
    Path(get_idx_path(prefix)).write_bytes(index_by_hand([1, 0, 1], 2, [0], 8))
    out = shown(capsys, prefix, samples=3, validate=True, vocab_size=9)
    assert "documents  0" in out and "sequence 2 (1 tokens)\n8\n" in out and "tokens in a sequence" in out


def test_ids_out_of_the_tokenizer_are_shown_as_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", [[104, 300]])
    assert "not in the vocabulary; check with --validate) 104 300" in shown(capsys, prefix, samples=1, **BYTES)


def test_the_vocabulary_of_the_tokenizer_is_checked_against(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[104, 1300]])
    model = str(write_rank_json(tmp_path))
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": model, "validate": True}
    inspect_dataset(InspectDatasetFlags(prefix=prefix, **given, tiktoken_num_special_tokens=1040))
    with pytest.raises(DataError, match=r"id 1300 \(sequence 0, token 1"):
        inspect_dataset(InspectDatasetFlags(prefix=prefix, **given, tiktoken_num_special_tokens=100))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"was made with a ByteLevelTokenizer of 257 tokens, but .* has 300"):
        inspect_dataset(InspectDatasetFlags(prefix=make(tmp_path), tokenizer_type="NullTokenizer", vocab_size=300))


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "lengths.png"
    assert f"wrote {picture}" in shown(capsys, make(tmp_path), png=str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"samples": -1}, "--samples -1 is too small; give 0"),
        ({"max_tokens": 0}, "--max-tokens 0 is too small; give 1"),
        ({"document": (4,)}, "--document 4 is out of range: .* legal: 0 to 3"),
        ({"document": (0, -5)}, "--document -5 is out of range: .* legal: 0 to 3"),
    ],
)
def test_settings_that_cannot_be_honoured(
    changes: dict, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        inspect_dataset(InspectDatasetFlags(prefix=make(tmp_path), **changes))
    assert capsys.readouterr().out == ""


def damage(prefix: str, name: str) -> None:
    """Damage one of the two files."""
    index, tokens = Path(get_idx_path(prefix)), Path(get_bin_path(prefix))
    content = index.read_bytes()
    broken = {
        "cut off": lambda: index.write_bytes(content[:-3]),
        "header cut off": lambda: index.write_bytes(content[:20]),
        "empty index": lambda: index.write_bytes(b""),
        "magic": lambda: index.write_bytes(b"PK" + content[2:]),
        "no index": index.unlink,
        "no tokens": tokens.unlink,
        "empty tokens": lambda: tokens.write_bytes(b""),
        "short tokens": lambda: tokens.write_bytes(tokens.read_bytes()[:-2]),
        "no sequence": lambda: index.write_bytes(index_by_hand([], 2, [0], 8)) and tokens.write_bytes(b""),
    }
    broken[name]()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cut off", r"a\.idx has \d+ bytes, expected \d+ .*truncated; copy it again, or prepare"),
        ("header cut off", r"a\.idx is truncated: it has 20 bytes, but the header has 34"),
        ("empty index", r"a\.idx is truncated: it has 0 bytes"),
        ("magic", r"a\.idx is not an index of a token file: it begins with b'PK"),
        ("no index", r"expected .*a\.idx, found no such file"),
        ("no tokens", r"expected .*a\.bin, found no such file"),
        ("empty tokens", r"a\.bin has 0 bytes, expected 646"),
        ("short tokens", r"a\.bin has 644 bytes, expected 646"),
        ("no sequence", r"a\.idx: 0 sequences have no tokens; prepare the data again"),
    ],
)
def test_damaged_files_are_told(name: str, sentence: str, tmp_path: Path) -> None:
    prefix = make(tmp_path)
    damage(prefix, name)
    with pytest.raises(DataError, match=sentence) as caught:
        inspect_dataset(InspectDatasetFlags(prefix=prefix, validate=True))
    assert "\n" not in str(caught.value)


def test_nothing_in_the_files_is_shown_as_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, write(tmp_path / "a", []), samples=3)
    assert "sequences  0" in out and "no sequence" in out
