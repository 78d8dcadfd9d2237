"""Documents that share a sequence: where each lies, and the positions in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_core.config import DataConfig
from megatron_core.errors import ConfigError
from megatron_core.tokenizers import Tokenizer

DOCUMENT_LENGTHS = "document_lengths"
"""The entry of a batch that stays on the host: attention by documents needs the lengths as Python's numbers."""


@dataclass(frozen=True)
class Packing:
    """What `--reset-position-ids` and `--reset-attention-mask` ask of a batch.

    A document ends with its end-of-document token `eod`, which belongs to it; the sequence's end cuts the last one.
    """

    eod: int
    reset_position_ids: bool
    reset_attention_mask: bool

    def entries(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """What the documents of `tokens` [b, s] add to a batch.

        position_ids, if they restart: int64 [b, s]. document_lengths, if attention is cut: int64 [b, d] for at most
        d documents in a sequence, rows filled up with 0.
        """
        found = {}
        if self.reset_position_ids:
            found["position_ids"] = restarted_positions(tokens, self.eod)
        if self.reset_attention_mask:
            found[DOCUMENT_LENGTHS] = document_lengths(tokens, self.eod)
        return found


def packing_of(data: DataConfig, tokenizer: Tokenizer | None) -> Packing | None:
    """What a configuration asks for, or None if it leaves sequences whole; ConfigError without an `eod`."""
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    if tokenizer is None or tokenizer.eod is None:
        flag = "--reset-position-ids" if data.reset_position_ids else "--reset-attention-mask"
        raise ConfigError(
            f"{flag} finds documents by their end-of-document id, and there is none; give a --tokenizer-type "
            f"whose vocabulary has one, or remove {flag}"
        )
    return Packing(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask)


def document_lengths(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Lengths of the documents in each row of `tokens` [b, s]: int64 [b, d], rows filled up with 0."""
    begins = _begins(tokens, eod)
    rows, positions = np.nonzero(begins)
    # The next document of the same row begins where this one ends; the last of a row ends with the row.
    ends = np.append(positions[1:], 0)
    ends[ends == 0] = tokens.shape[1]
    lengths = np.zeros((len(tokens), begins.sum(axis=1).max(initial=0)), dtype=np.int64)
    lengths[rows, begins.cumsum(axis=1)[rows, positions] - 1] = ends - positions
    return lengths


def restarted_positions(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Positions in their documents of the `tokens` [b, s], from 0: int64 [b, s]."""
    positions = np.arange(tokens.shape[1], dtype=np.int64)
    return positions - np.maximum.accumulate(np.where(_begins(tokens, eod), positions, 0), axis=1)


def _begins(tokens: np.ndarray, eod: int) -> np.ndarray:
    """True where a document begins: at a row's first token and behind each `eod`."""
    begins = np.ones(tokens.shape, dtype=bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    return begins
