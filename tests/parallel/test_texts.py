"""Texts between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_core.errors import ConfigError
from megatron_core.parallel.groups import LocalGroup
from megatron_core.parallel.texts import gather_strings, listed, raising_on_all_ranks
from megatron_core.verify.ranks import run_ranks

CPU = torch.device("cpu")
TEXTS = ["", "größer\n", "decoder.layers.0"]


def _gathered() -> list[list[str]]:
    mine = TEXTS[dist.get_rank()]
    return [gather_strings(text, dist.group.WORLD, CPU) for text in (mine, "")]


def test_every_rank_has_every_text_in_the_order_of_ranks() -> None:
    assert run_ranks(3, _gathered) == [[TEXTS, ["", "", ""]]] * 3


def _failing(error: Exception) -> str:
    with pytest.raises(Exception, match="shape 3") as found, raising_on_all_ranks(CPU):
        if dist.get_rank() == 1:
            raise error
    return f"{found.type.__name__}: {found.value}"


@pytest.mark.parametrize(("error", "told"), [(ConfigError("shape 3"), ""), (ValueError("shape 3"), "ValueError: ")])
def test_an_error_of_one_rank_is_raised_on_all(error: Exception, told: str) -> None:
    assert run_ranks(2, _failing, error) == [f"ConfigError: rank 1: {told}shape 3", f"{type(error).__name__}: shape 3"]


def test_a_rank_alone_has_its_own() -> None:
    assert gather_strings("alone", LocalGroup(), CPU) == ["alone"]


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"], 2) == "a, b"
    assert listed([1, 2, 3, 4], 2) == "1, 2 and 2 more"
