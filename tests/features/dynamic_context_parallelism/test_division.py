"""Runs in which documents are divided over a number of ranks that depends on their length, and the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.datasets.base import Sample
from megatron_core.training.setup import set_up
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks, this_world
from tests.parity.context_rows import CP2, DYNAMIC, SMALL
from tests.parity.rows import BASE, PACKED, PP2, ZERO2

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def _train(settings: dict[str, Any]) -> list[float]:
    """Losses and norms of two steps, and the loss of an evaluation."""
    run = set_up(RunConfig.from_flat(settings), this_world())
    results = [train_step(run) for _ in range(2)]
    dataset = run.train_loader.dataset
    return [*(value for result in results for value in (result.loss, result.grad_norm)), evaluate(run, dataset, 2)]


def test_conversations_of_different_lengths_train_as_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes" * n}] for n in range(1, 17)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    data = {
        "sft": True,
        "sft_packing": "first_fit",
        "mock_data": False,
        "data_path": (str(tmp_path / "chats.jsonl"),),
        "split": "1,0,0",
        "chat_template": str(tmp_path / "chat.jinja"),
        "tokenizer_type": "ByteLevelTokenizer",
        "vocab_size": None,
        "seq_length": 96,
    }
    settings = BASE | SMALL | data
    divided = DYNAMIC | CP2 | {"max_seqlen_per_dp_cp_rank": 24}
    expected = run_ranks(1, _train, settings)[0]
    for found in run_ranks(4, _train, settings | divided):
        assert found == pytest.approx(expected, rel=1e-9)


class OneToken(RaggedDataset):
    """Every fourth sample has one token that counts, at its end; with ``period`` 0 none has."""

    period = 4

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        mask = np.zeros_like(sample["loss_mask"])
        mask[-1] = self.period > 0 and index % self.period == 1
        return Sample(tokens=sample["tokens"], labels=sample["labels"], loss_mask=mask)


def _train_one(settings: dict[str, Any], period: int) -> list[float]:
    run = set_up(RunConfig.from_flat(settings), this_world())
    data = OneToken(run.vocab_size, run.config.data.seq_length)
    data.period = period
    run.train_loader = run.loader(data)
    result = train_step(run)
    return [result.loss, result.grad_norm, evaluate(run, data, 1)]


@pytest.mark.parametrize("period", [4, 0])
def test_batches_with_one_token_that_counts_or_none(period: int) -> None:
    """Every rank takes part in a step whose only document fits on one."""
    settings = BASE | SMALL | PACKED
    expected = run_ranks(1, _train_one, settings, period)[0]
    for found in run_ranks(4, _train_one, settings | DYNAMIC, period):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({}, 6, ("dp x cp = 6 is not a power of 2",)),
        ({"max_seqlen_per_dp_cp_rank": 7}, 2, ("max_seqlen_per_dp_cp_rank=7", "seq_length=16", "legal: 8 or more")),
        ({"min_dynamic_context_parallel_size": 8}, 4, ("min_dynamic_context_parallel_size=8", "up to dp x cp = 4")),
        ({"min_dynamic_context_parallel_size": 3}, 4, ("min_dynamic_context_parallel_size=3", "a power of 2")),
        ({"max_seqlen_per_dp_cp_rank": None}, 4, ("dynamic_context_parallel=True", "--max-seqlen-per-dp-cp-rank N")),
        ({"dynamic_context_parallel": False}, 4, ("max_seqlen_per_dp_cp_rank=4", "--dynamic-context-parallel")),
        (PP2, 4, ("pipeline_model_parallel_size=2", "use 1")),
        (ZERO2, 4, ("dp_zero_stage=2", "--zero-stage 1")),
        ({"num_experts": 4}, 4, ("num_experts=4", "remove --num-experts")),
        ({"calculate_per_token_loss": False}, 4, ("calculate_per_token_loss=False", "add --calculate-per-token-loss")),
        (CP2 | {"cp_comm_type": ("a2a",)}, 4, ("cp_comm_type=a2a", "use --cp-comm-type p2p or all_gather")),
        ({"attention_backend": "flex"}, 4, ("attention_backend=flex", "use --attention-backend auto")),
        ({"grad_compression": "powersgd"}, 4, ("grad_compression=powersgd", "use --grad-compression bf16 or none")),
        ({"log_max_attention_logit": True}, 4, ("dynamic_context_parallel=True", "remove --log-max-attention-logit")),
        ({"mtp_num_layers": 1}, 4, ("mtp_num_layers=1", "remove --mtp-num-layers")),
    ],
)
def test_rules(settings: dict[str, Any], ranks: int, words: tuple[str, ...]) -> None:
    config = RunConfig.from_flat(BASE | PACKED | {"global_batch_size": 24} | DYNAMIC | settings)
    messages = [*problems(config, ranks)]
    assert any(all(word in message for word in words) for message in messages), messages


def test_settings_that_it_divides_are_legal() -> None:
    assert [*problems(RunConfig.from_flat(BASE | PACKED | DYNAMIC | CP2), 4)] == []
