"""Megatron-LM's mock data in Megatron-LM's order."""

from __future__ import annotations

import hashlib

import numpy as np

from megatron_core.config import DataConfig, RunConfig, TrainingConfig
from megatron_core.features.megatron_order.mock import MockSequences
from megatron_core.training.data import make_splits

# Of MockGPTDataset of megatron-core 0.19.1 (NullTokenizer, vocabulary 128, seed 1234, sequences of 32 tokens, 40, 8
# and 4 samples requested): the sum and the hash of the tokens of the first samples, as int64.
EXPECTED = {
    "train": (75040, "0e7d4d678f6462d3"),
    "valid": (15488, "c4b46b49244422e8"),
    "test": (7008, "fa416d47667d58fc"),
}


def test_a_sequence_and_its_parts() -> None:
    sequences = MockSequences(5, 4)
    number = int(np.argmax(sequences.sequence_lengths > 9))
    length = int(sequences.sequence_lengths[number])
    whole = np.append((np.arange(length - 1) + 1) % 5, 4)
    np.testing.assert_array_equal(sequences.get(number), whole)
    for offset, count in ((0, 3), (2, length - 2), (3, length), (length - 1, 1), (length, 1)):
        np.testing.assert_array_equal(sequences.get(number, offset, count), whole[offset : offset + count])


def test_samples_are_those_of_megatron_core() -> None:
    data = DataConfig(mock_data=True, data_order="megatron", seq_length=32, vocab_size=128)
    training = TrainingConfig(train_iters=10, global_batch_size=4, eval_iters=1, eval_interval=10)
    splits = make_splits(RunConfig(data=data, training=training), 1, None, 128)
    for name, count in (("train", 40), ("valid", 8), ("test", 4)):
        dataset = getattr(splits, name)
        tokens = np.concatenate([dataset[i]["tokens"] for i in range(count)])
        assert (int(tokens.sum()), hashlib.sha256(tokens.tobytes()).hexdigest()[:16]) == EXPECTED[name]
        assert all(dataset[i]["loss_mask"].all() for i in range(count))
