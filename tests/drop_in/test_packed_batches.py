"""Batches with borders of documents, as Megatron-LM's ``pretrain_gpt.get_batch`` passes them to a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.test_gpt_model import gpt

LENGTH = 12
BORDERS = torch.tensor([[0, 5, 12, 12], [0, 3, 7, 12]], dtype=torch.int32)


def whole_batch() -> dict[str, Tensor]:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 19
    return {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "loss_mask": torch.ones(2, LENGTH),
        "position_ids": torch.arange(LENGTH).expand(2, -1),
        "cu_seqlens": BORDERS,
        "max_seqlen": torch.tensor([7, 5], dtype=torch.int32),
    }


def received(sizes: tuple[int, int]) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(sizes[0], context_parallel_size=sizes[1])
    given = whole_batch() if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
    batch = flatten_batch_for_packed_sequences(get_batch_on_this_tp_rank(given, has_cu_seqlens=True))
    return get_batch_on_this_cp_rank(batch)


def test_tensor_parallel_ranks_receive_the_borders() -> None:
    for batch in run_ranks(2, received, (2, 1)):
        assert batch["tokens"].tolist() == [whole_batch()["tokens"].flatten().tolist()]
        assert batch["cu_seqlens"].tolist() == [[0, 5, 12, 15, 19, 24]]
        assert batch["max_seqlen"].tolist() == [7] and batch["cu_seqlens"].dtype == torch.int32
        assert batch["attention_mask"] is batch["cu_seqlens_padded"] is batch["local_cp_size"] is None


def test_context_parallel_ranks_keep_the_borders_of_whole_sequences() -> None:
    first, second = run_ranks(2, received, (1, 2))
    assert first["cu_seqlens"].tolist() == second["cu_seqlens"].tolist() == [[0, 5, 12, 15, 19, 24]]
    tokens = whole_batch()["tokens"].view(1, -1)
    assert first["tokens"].tolist() == torch.cat([tokens[:, :6], tokens[:, 18:]], 1).tolist()
    assert second["tokens"].tolist() == tokens[:, 6:18].tolist()


def test_a_flat_batch_gives_the_losses_of_its_sequences() -> None:
    model = gpt()
    batch = flatten_batch_for_packed_sequences(whole_batch())
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=batch["cu_seqlens"][0], tokens_per_sample=LENGTH)
    losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"], packed_seq_params=packed)
    for number, sample in enumerate(zip(*(whole_batch()[name] for name in ("tokens", "labels")), strict=True)):
        tokens, labels = (row[None] for row in sample)
        borders = PackedSeqParams(cu_seqlens_q=BORDERS[number].unique_consecutive())
        alone = model(tokens, labels=labels, packed_seq_params=borders)
        part = losses[:, number * LENGTH : (number + 1) * LENGTH]
        torch.testing.assert_close(part, alone, rtol=1e-9, atol=1e-9)


def test_groups_of_several_context_parallel_sizes_are_refused() -> None:
    for function in (get_batch_on_this_cp_rank, get_batch_on_this_tp_rank):
        with pytest.raises(ConfigError, match="hybrid_context_parallel is not supported"):
            function(whole_batch(), is_hybrid_cp=True)  # type: ignore[operator]
