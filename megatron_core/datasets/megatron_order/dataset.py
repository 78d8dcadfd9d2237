"""Data sets in Megatron's order: the same samples at the same positions as Megatron-LM, for the same seed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_core.datasets.base import Dataset, Sample
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.megatron_order.blend_index import BlendIndex
from megatron_core.datasets.megatron_order.order import OrderOptions, SampleOrder
from megatron_core.errors import ConfigError, DataError

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


# What to change so that a split has more samples.
MORE = {
    "train": "--train-iters or --train-samples",
    "valid": "--train-iters or --eval-iters, or lower --eval-interval",
    "test": "--eval-iters",
}


class MegatronOrderedDataset:
    """The samples of one file in Megatron's order: item i is sample shuffle_index[i] of the sample index.

    The order is finite. DataError: an item past its end.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        order: SampleOrder,
        options: OrderOptions,
        split_name: str = "train",
        pad: int = NO_PAD,
        eod: int | None = None,
        eod_mask_loss: bool = False,
    ) -> None:
        if eod_mask_loss and eod is None:
            raise ConfigError("--eod-mask-loss needs an end-of-document id; give a tokenizer that has one")
        self.sequence_length = options.sequence_length
        self.order = order
        self._indexed = indexed
        self._extra_tokens = options.extra_tokens
        self._split_name = split_name
        self._pad = pad
        self._masked_token = eod if eod_mask_loss else None

    def __len__(self) -> int:
        """The number of samples; a little more than asked for, up to the last epoch's end."""
        return len(self.order)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples: what comes before any of them comes again."""
        return len(self)

    def __getitem__(self, index: int) -> Sample:
        """Item `index` of [0, len)."""
        check_place(index, len(self), self._split_name)
        number = int(self.order.shuffle_index[index])
        length, extra = self.sequence_length, self._extra_tokens
        text = read_text(self._indexed, self.order, number, length, extra, self._pad)
        return divide(text.tokens, extra, self._pad, self._masked_token)


class MegatronOrderedBlend:
    """Data sets drawn from in Megatron's order: item i is item dataset_sample_index[i] of number dataset_index[i].

    The order is finite. DataError: an item past its end.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        blend: BlendIndex,
        split_name: str = "train",
    ) -> None:
        self.sequence_length = datasets[0].sequence_length
        self.dataset_index = blend.dataset_index
        self.dataset_sample_index = blend.dataset_sample_index
        self._datasets = tuple(datasets)
        self._split_name = split_name

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset_index)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples: what comes before any of them comes again."""
        return len(self)

    def __getitem__(self, index: int) -> Sample:
        """Item `index` of [0, len)."""
        check_place(index, len(self), self._split_name)
        return self._datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]


def check_place(index: int, length: int, split_name: str) -> None:
    """DataError, with what to change, for an item past the end; IndexError for one before 0."""
    if index < 0:
        raise IndexError(f"sample {index}: the order starts at 0")
    if index >= length:
        raise DataError(
            f"sample {index} of the {split_name} data, of which --data-order megatron has ordered {length}: this order "
            f"ends, since Megatron's depends on how many samples are asked for; raise {MORE[split_name]} from the "
            "start of the run (which changes the order), or use --data-order keyed, which has no end"
        )
