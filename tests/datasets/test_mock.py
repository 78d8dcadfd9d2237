"""Synthetic text: pure, in range, and learnable."""

import numpy as np
import pytest

from megatron_core.datasets import MockDataset
from megatron_core.errors import ConfigError


@pytest.mark.parametrize("vocab_size", [2, 3, 50, 50257])
def test_samples(vocab_size: int) -> None:
    dataset = MockDataset(vocab_size, sequence_length=16, seed=5)
    for index in (0, 1, 2**40):
        sample = dataset[index]
        assert sample["tokens"].shape == sample["labels"].shape == sample["loss_mask"].shape == (16,)
        assert sample["tokens"].min() >= 0 and sample["labels"].max() < vocab_size
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
        steps = np.diff(sample["tokens"]) % vocab_size
        assert len(set(steps.tolist())) == 1 and 1 <= steps[0] <= 8
        np.testing.assert_equal(MockDataset(vocab_size, 16, 5)[index], sample)


def test_seeds_and_indices_differ() -> None:
    first = {(s, i): tuple(MockDataset(50257, 8, s)[i]["tokens"]) for s in range(3) for i in range(50)}
    assert len(set(first.values())) == len(first)


def test_vocabulary_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vocab-size of at least 2, found 1"):
        MockDataset(1, 8, 0)
