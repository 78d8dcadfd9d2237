"""Documents within a sequence, against a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.config import DataConfig
from megatron_core.datasets import MockDataset
from megatron_core.datasets.loader import BatchLoader, Packing, document_lengths, packing_of, restarted_positions
from megatron_core.errors import ConfigError
from megatron_core.tokenizers import build_tokenizer

EOD = 3
LENGTH = 9


def naive(tokens: list[int]) -> tuple[list[int], list[int]]:
    """Lengths of the documents and the position of each token in its own."""
    lengths, positions = [0], []
    for number, token in enumerate(tokens):
        positions.append(lengths[-1])
        lengths[-1] += 1
        if token == EOD and number + 1 < len(tokens):
            lengths.append(0)
    return lengths, positions


rows = st.integers(1, LENGTH).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(rows)
def test_documents_are_those_of_a_loop(tokens: list[list[int]]) -> None:
    expected = [naive(row) for row in tokens]
    lengths = document_lengths(np.array(tokens), EOD)
    assert [[n for n in row if n] for row in lengths.tolist()] == [own for own, _ in expected]
    assert restarted_positions(np.array(tokens), EOD).tolist() == [positions for _, positions in expected]
    assert lengths.dtype == np.int64
    assert lengths.shape == (len(tokens), max(len(own) for own, _ in expected))


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        ([0, 1, 2, 0], [4]),  # absent
        ([EOD, 1, 2, 0], [1, 3]),  # first
        ([0, 1, 2, EOD], [4]),  # last
        ([0, EOD, EOD, 0], [2, 1, 1]),  # doubled
        ([EOD] * 4, [1, 1, 1, 1]),
    ],
)
def test_an_end_of_document_belongs_to_the_document_that_it_ends(tokens: list[int], lengths: list[int]) -> None:
    assert document_lengths(np.array([tokens]), EOD).tolist() == [lengths]


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_batches_have_what_was_asked_for(positions: bool, attention: bool) -> None:
    dataset = MockDataset(7, LENGTH, 1)
    packing = Packing(EOD, reset_position_ids=positions, reset_attention_mask=attention)
    plain = BatchLoader(dataset, 4, 1, 2, vocab_size=7).step(0, 2)
    for batch, before in zip(BatchLoader(dataset, 4, 1, 2, 7, packing).step(0, 2), plain, strict=True):
        expected = [naive(row) for row in batch["tokens"].tolist()]
        assert ("position_ids" in batch) == positions
        if positions:
            assert batch["position_ids"].tolist() == [positions for _, positions in expected]
        assert ("document_lengths" in batch) == attention
        if attention:
            assert [[n for n in row if n] for row in batch["document_lengths"].tolist()] == [own for own, _ in expected]
        assert all(torch.equal(batch[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask"])
def test_packing_needs_an_end_of_document_id(name: str) -> None:
    data = DataConfig(**{name: True})
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    assert packing_of(data, tokenizer).eod == 256
    assert packing_of(DataConfig(), None) is None
    tokenizer.eod = None
    for without in (None, tokenizer):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*--tokenizer-type"):
            packing_of(data, without)
