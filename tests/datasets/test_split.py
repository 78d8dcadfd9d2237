"""Fractions and borders of the splits."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.datasets import parse_split, split_ranges
from megatron_core.errors import ConfigError


def test_parse() -> None:
    assert parse_split("969,30,1") == pytest.approx((0.969, 0.03, 0.001))
    assert parse_split(" 1, 1 ") == (0.5, 0.5, 0.0)
    assert parse_split("100") == (1.0, 0.0, 0.0)
    assert parse_split("0.9,0.1,0") == pytest.approx((0.9, 0.1, 0.0))


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ("9,x,1", "a part that is not a number"),
        ("", "a part that is not a number"),
        ("1,1,1,1", "has 4 parts"),
        ("0,0,0", "needs numbers >= 0"),
        ("-1,2", "needs numbers >= 0"),
        ("nan,1", "needs numbers >= 0"),
        ("inf", "needs numbers >= 0"),
    ],
)
def test_parse_refuses(split: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"--split {split} .*{sentence}|--split  {sentence}|{sentence}"):
        parse_split(split)


@pytest.mark.parametrize(
    ("split", "count", "borders"),
    [
        ("969,30,1", 1000, (0, 969, 999, 1000)),
        ("969,30,1", 20, (0, 19, 20, 20)),
        ("1,1,1", 10, (0, 3, 7, 10)),
        ("95,5,0", 598, (0, 568, 598, 598)),
        ("1,1,0", 5, (0, 2, 5, 5)),  # 2.5 rounds to the even 2, as Python's round does in Megatron
    ],
)
def test_ranges(split: str, count: int, borders: tuple[int, ...]) -> None:
    expected = tuple(range(a, b) for a, b in pairwise(borders))
    assert split_ranges(parse_split(split), count) == expected


@given(
    st.tuples(*[st.integers(0, 1000)] * 3).filter(any),
    st.integers(0, 2**40),  # C46
)
def test_ranges_cover_everything_once(shares: tuple[int, int, int], count: int) -> None:
    ranges = split_ranges(parse_split(",".join(map(str, shares))), count)
    assert ranges[0].start == 0 and ranges[2].stop == count
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    assert all(len(part) == 0 for part, share in zip(ranges, shares, strict=True) if share == 0)
