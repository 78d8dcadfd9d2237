"""Writing token files: complete or not at all, and never with wrapped numbers."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import DatasetHeader, IndexedDataset, get_bin_path, get_idx_path, read_header
from megatron_core.datasets.indexed import read_index
from megatron_core.errors import DataError
from megatron_core.preprocess import builder
from megatron_core.preprocess.atomic_write import atomic_write, partial_path
from megatron_core.preprocess.builder import IndexedDatasetBuilder, TokenWriter, write_header
from megatron_core.verify.ranks import run_ranks
from tests.datasets.files import write


def test_nothing_appears_before_finalize(tmp_path: Path) -> None:
    prefix = str(tmp_path / "sub" / "a")
    with IndexedDatasetBuilder(get_bin_path(prefix)) as builder:
        builder.add_document([1, 2], [2])
        assert not Path(get_bin_path(prefix)).exists()
        builder.finalize(get_idx_path(prefix))
        assert (builder.num_documents, IndexedDataset(prefix)[0].tolist()) == (1, [1, 2])
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == ["a.bin", "a.idx"]


def test_a_failed_build_leaves_the_old_files(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(get_bin_path(prefix)) as builder:
        builder.add_item([9] * 100)
        raise RuntimeError
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """Root could rename a file to /dev/null, which all programs would then write to."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(pipe) as file:
        file.write(b"text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
    os.close(reader)


@pytest.mark.parametrize(("dtype", "token"), [(np.uint16, 65536), (np.uint16, -1), (np.int32, 2**31)])
def test_a_token_that_does_not_fit_is_an_error(dtype: type, token: int, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype) as builder:
        sentence = f"token id {token} does not fit {np.dtype(dtype).name}"
        for tokens in ([1, token], np.array([1, token])):
            with pytest.raises(DataError, match=sentence):
                builder.add_item(tokens)
        assert builder.num_tokens == 0


def test_lengths_must_add_up(tmp_path: Path) -> None:
    with (
        IndexedDatasetBuilder(str(tmp_path / "a.bin")) as builder,
        pytest.raises(DataError, match=r"3 tokens cannot have sequences of \[1, 1\]"),
    ):
        builder.add_document([1, 2, 3], [1, 1])


def test_memory_does_not_grow_with_the_sequences(tmp_path: Path) -> None:
    # In a fork: threads of other tests, such as clients of a server, would allocate memory here.
    ((few, many),) = run_ranks(1, _peaks, str(tmp_path / "a"))
    # In memory 9,000 more documents would be 160 kB; their index is written in blocks of 4 kB.
    assert IndexedDataset(str(tmp_path / "a")).document_indices[-1] == 20_000
    assert many < few + 40_000


def _peaks(prefix: str) -> list[int]:
    """The peaks of memory while 1,000 and 10,000 documents are written."""
    builder.BLOCK_BYTES = 4096
    peaks = []
    for documents in (1_000, 10_000):
        tracemalloc.start()
        with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as writer:
            for _ in range(documents):
                writer.add_document([1, 2, 3], [1, 2])
            writer.finalize(f"{prefix}.idx")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return peaks


def test_pointers_run_on_from_block_to_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C46
    monkeypatch.setattr("megatron_core.preprocess.builder.BLOCK_BYTES", 16)
    lengths = np.random.default_rng(0).integers(0, 2**31 - 1, 50).astype(np.int32)
    writer = TokenWriter(tmp_path / "a.bin", np.int32)
    writer.note_sequences(lengths)
    writer.end_documents(np.arange(1, 51))
    writer.write_index(tmp_path / "a.idx")
    index = read_index(partial_path(tmp_path / "a.idx"), multimodal=False, mmap=False)
    expected = [4 * sum(lengths[:n].tolist()) for n in range(50)]
    assert index.sequence_pointers.tolist() == expected and expected[-1] > 2**34
    assert index.document_indices.tolist() == list(range(51))
    writer.discard()


def test_a_writer_goes_on_from_what_was_synced(tmp_path: Path) -> None:
    first = TokenWriter(tmp_path / "a.bin", np.uint16)
    first.append(np.array([1, 2, 3], np.uint16), np.array([2, 1]), np.array([1, 1]))
    extent = first.sync()
    first.append(np.array([9] * 50, np.uint16), np.array([50]), np.array([1]))
    first.close()
    again = TokenWriter(tmp_path / "a.bin", np.uint16, resume=extent)
    again.append(np.array([4], np.uint16), np.array([1]), np.array([0, 1]))
    again.finalize(tmp_path / "a.idx")
    dataset = IndexedDataset(str(tmp_path / "a"))
    assert [sequence.tolist() for sequence in dataset[:]] == [[1, 2], [3], [4]]
    assert dataset.document_indices.tolist() == [0, 1, 2, 2, 3]
    partial_path(tmp_path / "b.bin").write_bytes(b"")
    for name in ("lengths", "documents"):
        partial_path(tmp_path / f"b.bin.{name}").write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.bin\.partial is shorter than the 6 bytes that an interrupted run"):
        TokenWriter(tmp_path / "b.bin", np.uint16, resume=extent)


def test_add_index_appends_documents(tmp_path: Path) -> None:
    parts = [[[1, 2], [3]], [[4], [], [5, 6, 7]]]
    prefixes = [write(tmp_path / f"part{n}", part) for n, part in enumerate(parts)]
    merged, whole = str(tmp_path / "merged"), write(tmp_path / "whole", parts[0] + parts[1])
    with IndexedDatasetBuilder(get_bin_path(merged)) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
        builder.finalize(get_idx_path(merged))
    for path in (get_bin_path, get_idx_path):
        assert Path(path(merged)).read_bytes() == Path(path(whole)).read_bytes()


def test_add_index_refuses_another_dtype(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1]], np.uint16)
    with (
        IndexedDatasetBuilder(str(tmp_path / "b.bin"), np.int32) as builder,
        pytest.raises(DataError, match="holds uint16 and cannot be appended to int32"),
    ):
        builder.add_index(prefix)


def test_rebuilding_removes_the_old_header_and_nobody_elses(tmp_path: Path) -> None:
    header = DatasetHeader(
        tokenizer_type="NullTokenizer",
        fingerprint="0",
        vocab_size=5,
        eod=4,
        append_eod=False,
        documents=1,
        tokens=1,
    )
    prefix = write(tmp_path / "a", [[1]])
    write_header(prefix, header)
    write(tmp_path / "a", [[2]])
    assert read_header(prefix) is None
    foreign = tmp_path / "b.json"
    foreign.write_text(json.dumps({"mine": 1}))
    write(tmp_path / "b", [[2]])
    assert json.loads(foreign.read_text()) == {"mine": 1}
