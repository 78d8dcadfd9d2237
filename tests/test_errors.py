"""Messages stay readable for any values."""

from __future__ import annotations

import pytest

from megatron_core.config.validate import check
from megatron_core.errors import LONGEST_LINE, LONGEST_MESSAGE, ConfigError
from tests.runs import tiny_config


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ("x" * 10**6, 400),
        ("漢" * 10**6, 400),
        ("a b " * 10**6, LONGEST_LINE + 100),
        ("a\n" * 10**6, LONGEST_MESSAGE + 100),
    ],
)
def test_long_values_are_cut_and_the_way_out_is_not(value: str, most: int) -> None:
    text = str(ConfigError(f"save={value} cannot be written; give another folder"))
    assert len(text) < most and text.startswith("save=") and text.endswith("cannot be written; give another folder")
    assert "characters)" in text


def test_short_messages_stay_as_they_are() -> None:
    for text in ("", "a=1 is wrong", "x" * 200, "two\nlines", "/a/path " * 200):
        assert str(ConfigError(text)) == text


def test_a_long_value_of_a_setting() -> None:
    with pytest.raises(ConfigError) as error:
        check(tiny_config(split="9" * 10_000), 1)
    assert len(str(error.value)) < 500 and "such as 969,30,1" in str(error.value)
