"""Samples of equal length, cut from one token file."""

import numpy as np

from megatron_core.datasets.base import Sample
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.permutation import KeyedPermutation
from megatron_core.datasets.token_text import TokenText
from megatron_core.errors import ConfigError, DataError


class KeyedGPTDataset:
    """Samples of L tokens from a range of a file's sequences, in an endless order.

    The sequences are read as one text of T tokens, across the borders of documents. An epoch has
    n = (T - 1) // L samples; sample j holds the tokens [j L, j L + L], the last of them as label only. Item i
    is sample KeyedPermutation(n, (seed, epoch))[k] with epoch, k = divmod(i, n): no index is built or stored.

    eod_mask_loss: loss_mask is 0 where the input token is `eod`.
    DataError: the range has too few tokens for one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_range: range,
        sequence_length: int,
        seed: int,
        split_name: str = "train",
        eod: int | None = None,
        eod_mask_loss: bool = False,
    ) -> None:
        if eod_mask_loss and eod is None:
            raise ConfigError("--eod-mask-loss needs an end-of-document id; give a tokenizer that has one")
        self.sequence_length = sequence_length
        self._text = TokenText(indexed, sequence_range)
        self._seed = seed
        self._masked_token = eod if eod_mask_loss else None
        self.samples_per_epoch = (self.num_tokens - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{indexed.path_prefix}: the {split_name} split has {self.num_tokens} tokens in "
                f"{len(sequence_range)} sequences, and one sample needs {sequence_length + 1} (--seq-length "
                f"{sequence_length} and the label of the last token); prepare more text, change --split, or "
                "lower --seq-length"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens in the range."""
        return len(self._text)

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        epoch, place = divmod(index, self.samples_per_epoch)
        number = KeyedPermutation(self.samples_per_epoch, (self._seed, epoch))[place]
        text = self._text.read(number * self.sequence_length, self.sequence_length + 1)
        tokens = text[:-1]
        loss_mask = np.ones(self.sequence_length, dtype=np.float32)
        if self._masked_token is not None:
            loss_mask[tokens == self._masked_token] = 0.0
        return Sample(tokens=tokens, labels=text[1:], loss_mask=loss_mask)
