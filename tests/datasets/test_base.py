"""A round of all samples, with which whole validation sets are evaluated."""

from megatron_core.datasets import KeyedGPTDataset
from megatron_core.datasets.base import WholeRound
from tests.datasets.files import FakeIndexed


def test_samples_after_the_last_one_count_no_token() -> None:
    dataset = KeyedGPTDataset(FakeIndexed([13]), range(1), 4, seed=0)
    samples = WholeRound(dataset)
    assert len(samples) == 3
    counted = [int(samples[number]["loss_mask"].sum()) for number in range(6)]
    assert counted == [4, 4, 4, 0, 0, 0]
