"""Document, sample and shuffle indices together, against the algorithm step by step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import DataError
from megatron_core.features.megatron_order import order as shuffle_module
from megatron_core.features.megatron_order.order import OrderOptions, build_order, build_shuffle_index, plan_epochs
from tests.features.megatron_order import reference

SIZES = [17, 3, 0, 40, 12, 9, 25, 1, 30, 8, 14, 22, 5, 19, 33, 2, 11, 7, 28, 16]
TOKENS = sum(SIZES)


@pytest.mark.parametrize(
    ("num_samples", "epochs", "separate"),
    # An epoch of 302 tokens has 37 samples of 8 and five tokens; 29 is int(0.8 * 37).
    [
        (None, 1, False),
        (0, 1, False),
        (37, 1, False),
        (38, 2, True),
        (65, 2, True),
        (66, 2, False),
        (75, 2, False),
        (76, 3, True),
        (103, 3, True),
        (104, 3, False),
        (400, 11, True),
    ],
)
def test_epochs_and_the_last_one(num_samples: int | None, epochs: int, separate: bool) -> None:
    assert TOKENS == 302
    expected = reference.indices(SIZES, range(20), 8, num_samples, seed=1234)
    assert expected[3:] == (epochs, separate)
    order = build_order(np.array(SIZES, dtype=np.int32), range(20), OrderOptions(8, num_samples, 1234))
    assert order.document_index.tolist() == expected[0]
    assert [tuple(row) for row in order.sample_index.tolist()] == expected[1]
    assert order.shuffle_index.tolist() == expected[2]
    dtypes = (order.document_index.dtype, order.sample_index.dtype, order.shuffle_index.dtype)
    assert dtypes == (np.int32, np.int32, np.uint32)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.integers(1, 20),
    st.one_of(st.none(), st.integers(0, 60)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1]),
    st.booleans(),
    st.data(),
)
def test_all_indices_for_any_documents(
    sizes: list[int], length: int, num_samples: int | None, seed: int, extra: int, drop: bool, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(sizes) - 1))
    documents = range(start, data.draw(st.integers(start + 1, len(sizes))))
    options = OrderOptions(length, num_samples, seed, extra, drop)
    array = np.array(sizes, dtype=np.int32)
    if not sum(sizes[d] for d in documents):
        with pytest.raises(DataError, match="have no tokens"):
            build_order(array, documents, options)
        return
    expected = reference.indices(sizes, documents, length, num_samples, seed, extra, drop)
    order = build_order(array, documents, options)
    assert order.document_index.tolist() == expected[0]
    assert [tuple(row) for row in order.sample_index.tolist()] == expected[1]
    assert order.shuffle_index.tolist() == expected[2]
    assert len(order) == len(expected[1]) - 1 >= (num_samples or 0)


@pytest.mark.parametrize(("in_last", "before"), [(1, 1000), (799, 1000), (800, None), (1000, None)])
def test_a_last_epoch_stands_alone_below_four_fifths(in_last: int, before: int | None) -> None:
    plan = plan_epochs(1001, 1, num_samples=1000 + in_last)
    assert (plan.count, plan.samples_before_last) == (2, before)


def test_epochs_of_data_past_32_bits() -> None:
    tokens = 3 * 10**12  # C46
    plan = plan_epochs(tokens, 4096, num_samples=10**9)
    assert plan.count == 2
    assert plan.samples_before_last == (tokens - 1) // 4096
    assert plan_epochs(tokens, 4096, num_samples=(tokens - 1) // 4096).count == 1


def test_numbers_of_samples_past_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shuffle_module.TOO_MANY_FOR_UINT32 == 2**32 - 2  # C46
    monkeypatch.setattr(shuffle_module, "TOO_MANY_FOR_UINT32", 10)
    narrow, wide = (build_shuffle_index(n, n, np.random.RandomState(3)) for n in (9, 10))
    assert (narrow.dtype, wide.dtype) == (np.uint32, np.int64)
    assert sorted(wide.tolist()) == list(range(10))
