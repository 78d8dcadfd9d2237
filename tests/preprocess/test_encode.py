"""Tokenization of some texts."""

import numpy as np
import pytest

from megatron_core.preprocess.backends import TokenizerBackend
from megatron_core.preprocess.worker import FEW, TokenFormat, encode
from megatron_core.tokenizers import ByteLevelTokenizer


@pytest.mark.parametrize("count", [0, 1, FEW, FEW + 1, 3 * FEW])
def test_an_eod_ends_every_text_that_is_not_empty(count: int) -> None:
    texts = ["abcdefghij"[: 7 * n % 11] for n in range(count)]
    found = encode(texts, TokenizerBackend(ByteLevelTokenizer()), TokenFormat("uint16", 257, 256))
    filled = [[*text.encode(), 256] for text in texts if text]
    assert found.tokens.dtype == np.uint16 and found.tokens.tolist() == [token for ids in filled for token in ids]
    assert found.lengths.tolist() == [len(ids) for ids in filled]
    assert found.counts.tolist() == [int(bool(text)) for text in texts]


def test_an_eod_ends_a_document_and_not_its_sentences() -> None:
    layout = TokenFormat("uint16", 257, 256)
    found = encode(["a b", "", "c"], TokenizerBackend(ByteLevelTokenizer()), layout, str.split)
    assert found.tokens.tolist() == [*b"a", *b"b", 256, *b"c", 256]
    assert found.lengths.tolist() == [1, 2, 2] and found.counts.tolist() == [2, 0, 1]
