"""Joining token files: the result equals that of one run over all documents; incompatible files are an error."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_core.commands.merge_datasets import MergeFlags, merge_datasets
from megatron_core.datasets import DatasetHeader, IndexedDataset, get_bin_path, get_idx_path, read_header
from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess.builder import IndexedDatasetBuilder, write_header
from megatron_core.tokenizers import ByteLevelTokenizer, NullTokenizer
from tests.datasets.files import write
from tests.programs import run_program

PARTS = {"b": [[4], [], [5, 6, 7]], "a": [[1, 2], [3]], "c.x": [[8, 9]]}
SORTED = [*PARTS["a"], *PARTS["b"], *PARTS["c.x"]]


run = partial(run_program, "tools/merge_datasets.py")


def make(folder: Path, headers: bool = True) -> Path:
    """A folder of three pairs of files."""
    parts = folder / "parts"
    for name, documents in PARTS.items():
        prefix = write(parts / name, documents, np.uint16)
        if headers:
            write_header(prefix, header(documents))
    (parts / "notes.txt").write_text("not one of them")
    return parts


def header(documents: list[list[int]]) -> DatasetHeader:
    """The header of a file of documents."""
    counts = {"documents": len(documents), "tokens": sum(map(len, documents))}
    return DatasetHeader.of(ByteLevelTokenizer(), "ByteLevelTokenizer", append_eod=False, **counts)


def content(prefix: object) -> list[bytes]:
    """Both files' bytes."""
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def test_a_folder_is_joined_in_sorted_order(tmp_path: Path) -> None:
    output = tmp_path / "new" / "all"
    done = run("--input", make(tmp_path), "--output-prefix", output)
    assert done.returncode == 0, done.stderr
    assert content(output) == content(write(tmp_path / "whole", SORTED, np.uint16))
    assert read_header(str(output)) == header(SORTED)
    assert done.stdout == f"{output}: 6 documents, 9 tokens of 3 files\n"
    assert done.stderr == "" and sorted(path.name for path in output.parent.iterdir()) == [
        "all.bin",
        "all.idx",
        "all.json",
    ]


def test_prefixes_are_joined_in_the_order_given(tmp_path: Path) -> None:
    parts = make(tmp_path)
    merge_datasets(MergeFlags(input=(str(parts / "b"), str(parts / "a")), output_prefix=str(tmp_path / "all")))
    assert content(tmp_path / "all") == content(write(tmp_path / "whole", PARTS["b"] + PARTS["a"], np.uint16))


def test_one_input_is_copied(tmp_path: Path) -> None:
    parts = make(tmp_path)
    merge_datasets(MergeFlags(input=(str(parts / "a"),), output_prefix=str(tmp_path / "all")))
    assert content(tmp_path / "all") == content(parts / "a")


def test_modes_are_kept(tmp_path: Path) -> None:
    for name, modes in (("a", [1, 2]), ("b", [3])):
        with IndexedDatasetBuilder(str(tmp_path / "parts" / f"{name}.bin"), np.int32, multimodal=True) as builder:
            builder.add_document(range(len(modes)), [1] * len(modes), modes)
            builder.finalize(str(tmp_path / "parts" / f"{name}.idx"))
    given = MergeFlags(input=(str(tmp_path / "parts"),), output_prefix=str(tmp_path / "all"))
    with pytest.raises(DataError, match=r"a was written as multimodal, and its modes would be lost; give --multimodal"):
        merge_datasets(given)
    merge_datasets(replace(given, multimodal=True))
    dataset = IndexedDataset(str(tmp_path / "all"), multimodal=True)
    assert dataset.sequence_modes.tolist() == [1, 2, 3] and dataset.document_indices.tolist() == [0, 2, 3]
    assert not (tmp_path / "all.json").exists()


def test_a_header_that_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = make(tmp_path)
    (parts / "b.json").unlink()
    merge_datasets(MergeFlags(input=(str(parts),), output_prefix=str(tmp_path / "all")))
    assert "no header is written: " in (said := capsys.readouterr().err) and "b has none, so" in said
    assert read_header(str(tmp_path / "all")) is None
    again = MergeFlags(input=(str(make(tmp_path / "other", headers=False)),), output_prefix=str(tmp_path / "all"))
    with pytest.raises(ConfigError, match=r"all\.bin already exists; .*--overwrite"):
        merge_datasets(again)
    merge_datasets(replace(again, overwrite=True))
    assert "no header" not in capsys.readouterr().err


def with_header(parts: Path, name: str, **changes: object) -> None:
    """Change a part's header."""
    write_header(str(parts / name), replace(read_header(str(parts / name)), **changes))


def test_headers_that_disagree(tmp_path: Path) -> None:
    parts = make(tmp_path)
    given = MergeFlags(input=(str(parts),), output_prefix=str(tmp_path / "all"))
    null = NullTokenizer(300)
    with_header(parts, "b", tokenizer_type="NullTokenizer", fingerprint=null.fingerprint(), vocab_size=300)
    with pytest.raises(DataError, match=r"b was made with a NullTokenizer of 300 tokens \(fingerprint .*a with a Byte"):
        merge_datasets(given)
    make(tmp_path)
    with_header(parts, "c.x", append_eod=True)
    with pytest.raises(
        DataError, match=r"documents of .*c\.x end with the id 256, but those of .*a have no end-of-doc"
    ):
        merge_datasets(given)
    assert not (tmp_path / "all.bin").exists()


def test_dtypes_that_disagree(tmp_path: Path) -> None:
    parts = make(tmp_path)
    write(parts / "b", [[1]], np.int32)
    with pytest.raises(DataError, match=r"b holds int32 and .*a uint16; preprocess all of them with the same"):
        merge_datasets(MergeFlags(input=(str(parts),), output_prefix=str(tmp_path / "all")))


def test_sequences_without_a_document_are_not_given_to_the_next_file(tmp_path: Path) -> None:
    parts = make(tmp_path, headers=False)
    for name in ("aa", "ab"):
        with IndexedDatasetBuilder(get_bin_path(str(parts / name)), np.uint16) as builder:
            builder.add_item([1, 2])
            builder.finalize(get_idx_path(str(parts / name)))
    with pytest.raises(DataError, match=r"the last sequences of .*aa belong to no document, and would join"):
        merge_datasets(MergeFlags(input=(str(parts),), output_prefix=str(tmp_path / "all")))
    # If no file has documents, the result has none either.
    merge_datasets(MergeFlags(input=(str(parts / "aa"), str(parts / "ab")), output_prefix=str(tmp_path / "all")))
    dataset = IndexedDataset(str(tmp_path / "all"))
    assert dataset.document_indices.tolist() == [0] and len(dataset) == 2


def test_the_output_is_none_of_the_inputs(tmp_path: Path) -> None:
    parts = make(tmp_path)
    before = content(parts / "a")
    for output in (parts / "a", parts / ".." / "parts" / "a"):
        with pytest.raises(ConfigError, match=r"--output-prefix .*a is one of the inputs; choose another one"):
            merge_datasets(MergeFlags(input=(str(parts),), output_prefix=str(output)))
    assert content(parts / "a") == before
    (tmp_path / "all.json").write_text("{}")
    with pytest.raises(DataError, match=r"all\.json exists and is not the header"):
        merge_datasets(MergeFlags(input=(str(parts),), output_prefix=str(tmp_path / "all")))


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    output = str(tmp_path / "all")
    with pytest.raises(ConfigError, match="--input is empty"):
        merge_datasets(MergeFlags(input=(), output_prefix=output))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"--input .*empty: there is no \.bin/\.idx pair"):
        merge_datasets(MergeFlags(input=(str(empty),), output_prefix=output))
    with pytest.raises(DataError, match=r"token file .*absent: expected .*absent\.bin"):
        merge_datasets(MergeFlags(input=(str(tmp_path / "absent"),), output_prefix=output))
    parts = make(tmp_path)
    with pytest.raises(ConfigError, match=r"--input has .*a twice, so its documents would be dup"):
        merge_datasets(MergeFlags(input=(str(parts), str(parts / "a")), output_prefix=output))
    for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
        (parts / f"z{suffix}").write_bytes(b"")
        with pytest.raises(DataError, match=rf"--input .*parts: z\{suffix} has no z\{other};"):
            merge_datasets(MergeFlags(input=(str(parts),), output_prefix=output))
        (parts / f"z{suffix}").unlink()
    with pytest.raises(DataError, match="these files have no tokens"):
        merge_datasets(MergeFlags(input=(write(tmp_path / "n", []), write(tmp_path / "m", [[]])), output_prefix=output))
    assert not Path(get_bin_path(output)).exists()


def test_a_damaged_input_is_told_before_anything_is_written(tmp_path: Path) -> None:
    parts = make(tmp_path)
    path = parts / "c.x.bin"
    path.write_bytes(path.read_bytes()[:-1])
    done = run("--input", parts, "--output-prefix", tmp_path / "all")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"merge_datasets: {path} has 3 bytes, expected 4")
    assert not list(tmp_path.glob("all*"))


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Tokens outside of sequences would shift all later documents."""
    parts = make(tmp_path)
    settings = MergeFlags(input=(str(parts),), output_prefix=str(tmp_path / "all"))
    tokens = parts / "a.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole + bytes(2))
    with pytest.raises(DataError, match=r"a\.bin has 8 bytes, expected 6 from .*a\.idx"):
        merge_datasets(settings)
    tokens.write_bytes(whole)
    write_header(str(parts / "a"), replace(header(PARTS["a"]), tokens=4))
    with pytest.raises(DataError, match=r"a\.json says tokens=4, but the files have 3"):
        merge_datasets(settings)
    assert not list(tmp_path.glob("all*"))
