"""The histogram of document lengths against counting them one by one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import IndexedDataset, get_bin_path, get_idx_path
from megatron_core.preprocess import validate as validate_module
from megatron_core.preprocess.builder import IndexedDatasetBuilder
from megatron_core.preprocess.lengths import EDGES, Lengths, closed_document_lengths, plot_lengths
from tests.datasets.files import write

RANDOM = np.random.default_rng(3)
COUNTED = [0, 0, 1, 1, 1, 2, 3, 4, 7, 8, 9, 100, 255, 256, 1000, *RANDOM.integers(0, 600, 200).tolist()]


def lengths_of(folder: Path, lengths: Sequence[int]) -> Lengths:
    """The histogram of documents of the given lengths."""
    return closed_document_lengths(IndexedDataset(write(folder / "a", [[1] * length for length in lengths], np.uint16)))


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("parts", [1, 2, 16])
def test_bars_count_every_document_once(
    block: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate_module, "BLOCK", block)
    found = lengths_of(tmp_path, COUNTED)
    bars = found.bars(parts)
    for bar in bars:
        inside = [length for length in COUNTED if bar.low <= length < bar.high]
        assert (bar.documents, bar.tokens) == (len(inside), sum(inside))
    assert sum(bar.documents for bar in bars) == found.count == len(COUNTED)
    assert [bar.low for bar in bars[1:]] == [bar.high for bar in bars[:-1]]
    assert (found.shortest, found.longest, found.unit) == (0, 1000, "documents")
    assert found.mean == pytest.approx(np.mean(COUNTED))


def test_quantiles_are_within_their_bar(tmp_path: Path) -> None:
    found = lengths_of(tmp_path, COUNTED)
    for share in (0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(COUNTED, share, method="inverted_cdf")
        assert exact <= found.quantile(share) <= max(exact * 2 ** (1 / 16), exact)


def test_edges_reach_beyond_the_longest_document() -> None:
    assert EDGES[0] == 1 and EDGES[-1] == 2**48 and (np.diff(EDGES) > 0).all()


def test_documents_of_several_sequences_and_of_none(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(get_bin_path(prefix)) as builder:
        builder.add_document([1] * 5, [2, 0, 3])
        builder.end_document()
        builder.add_document([1] * 7, [7])
        builder.end_document()
        builder.finalize(get_idx_path(prefix))
    found = closed_document_lengths(IndexedDataset(prefix))
    assert [(bar.low, bar.documents) for bar in found.bars(16) if bar.documents] == [(0, 2), (5, 1), (7, 1)]


def test_sequences_are_counted_where_no_document_is_closed(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(get_bin_path(prefix)) as builder:
        builder.add_item([1, 2, 3])
        builder.finalize(get_idx_path(prefix))
    found = closed_document_lengths(IndexedDataset(prefix))
    assert (found.unit, found.count, found.longest) == ("sequences", 1, 3)


def test_nothing_at_all(tmp_path: Path) -> None:
    for documents in ([], [0, 0]):
        found = lengths_of(tmp_path, documents)
        assert (found.count, found.longest, found.mean) == (len(documents), 0, 0.0)
        assert sum(bar.documents for bar in found.bars(1)) == len(documents)
        plot_lengths(found, tmp_path / "empty.png", "empty")


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    plot_lengths(lengths_of(tmp_path, COUNTED), tmp_path / "new" / "lengths.png", "lengths")
    content = (tmp_path / "new" / "lengths.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000
