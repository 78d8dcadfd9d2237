"""From a place in Megatron's order to tokens, labels and loss mask."""

from typing import Any, NamedTuple

import numpy as np

from megatron_core.datasets.base import Sample
from megatron_core.datasets.megatron_order.order import SampleOrder

# What fills a sample that is short of tokens where no id of the vocabulary is set apart for it: no token's id.
NO_PAD = -1


class Text(NamedTuple):
    """The tokens of a sample before its division: int64 [L + x], and of how many of them each document is made."""

    tokens: np.ndarray
    lengths: tuple[int, ...]


def read_text(indexed: Any, order: SampleOrder, number: int, length: int, extra_tokens: int, pad: int) -> Text:
    """The L + x tokens of sample `number` of the sample index, filled up with `pad` at the end.

    They begin at row `number` and end x tokens after row `number + 1`; consecutive samples share x tokens.
    """
    first, offset = (int(value) for value in order.sample_index[number])
    last, stop = (int(value) for value in order.sample_index[number + 1])
    tokens = np.full(length + extra_tokens, pad, dtype=np.int64)
    lengths = []
    filled = 0
    for entry in range(first, last + 1):
        document = int(order.document_index[entry])
        end = stop + extra_tokens if entry == last else int(indexed.sequence_lengths[document])
        count = end - offset
        if count > 0:
            tokens[filled : filled + count] = indexed.get(document, offset, count)
            lengths.append(count)
        filled += count
        offset = 0
    return Text(tokens, tuple(lengths))


def divide(text: np.ndarray, extra_tokens: int, pad: int, masked_token: int | None) -> Sample:
    """Tokens and labels of a text, and the mask of the labels that count.

    Labels are the text from its second token on; without an extra token, the last label is padding. The mask is 0
    where the label is `pad` and where the token is `masked_token`. Padding becomes id 0, which an embedding has.
    """
    if extra_tokens:
        tokens, labels = text[:-1].copy(), text[1:].copy()
    else:
        tokens, labels = text.copy(), np.append(text[1:], pad)
    mask = np.ones(len(tokens), dtype=np.float32)
    mask[labels == pad] = 0.0
    if masked_token is not None:
        mask[tokens == masked_token] = 0.0
    tokens[tokens == pad] = 0
    labels[labels == pad] = 0
    return Sample(tokens=tokens, labels=labels, loss_mask=mask)
