"""Texts between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_core.parallel.groups import LocalGroup
from megatron_core.parallel.texts import gather_texts, listed
from megatron_core.verify.ranks import run_ranks

CPU = torch.device("cpu")
TEXTS = ["", "größer\n", "decoder.layers.0"]


def _gathered() -> list[list[str]]:
    mine = TEXTS[dist.get_rank()]
    return [gather_texts(text, dist.group.WORLD, CPU) for text in (mine, "")]


def test_every_rank_has_every_text_in_the_order_of_ranks() -> None:
    assert run_ranks(3, _gathered) == [[TEXTS, ["", "", ""]]] * 3


def test_a_rank_alone_has_its_own() -> None:
    assert gather_texts("alone", LocalGroup(), CPU) == ["alone"]


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"], 2) == "a, b"
    assert listed([1, 2, 3, 4], 2) == "1, 2 and 2 more"
