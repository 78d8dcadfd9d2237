"""The flags affect attention and positions in the training step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_core.training.driver import StepWork, forward_backward
from megatron_core.training.objective import count_tokens
from megatron_core.training.step import forward_step
from megatron_core.verify.gpt import RaggedDataset
from tests.runs import tiny_run

EOD = 60
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}


def _losses(settings: dict) -> list[float]:
    """The loss after the first document end in each sequence, before and after a change of the tokens up to it."""
    run = tiny_run(fp64=True, init_method_std=0.3, micro_batch_size=4, **settings)
    (batch,) = run.micro_batches(run.loader(RaggedDataset(61, 16, EOD)).step(0, 1))
    behind = (batch.tokens == EOD).cumsum(1) - (batch.tokens == EOD).int() > 0
    assert behind.any() and not behind.all(1).any()
    batch = replace(batch, loss_mask=behind.float())
    moved = torch.where(behind | (batch.tokens == EOD), batch.tokens, (batch.tokens + 1) % EOD)
    return [forward_step(run, [replace(batch, tokens=tokens)])(0, 0, None).item() for tokens in (batch.tokens, moved)]


@pytest.mark.parametrize("position_embedding_type", ["learned_absolute", "rope"])
def test_the_flags_isolate_documents(position_embedding_type: str) -> None:  # C45
    settings = {"position_embedding_type": position_embedding_type}
    before, after = _losses(PACKED | settings)
    assert before == after
    before, after = _losses(settings)
    assert before != after
    before, after = _losses(settings | {"tokenizer_type": "NullTokenizer", "reset_position_ids": True})
    assert before != after, "positions that restart hide nothing"


@pytest.mark.parametrize("position_embedding_type", ["learned_absolute", "rope"])
def test_positions_restart_only_if_asked(position_embedding_type: str) -> None:
    """Without the mask: rotary attention depends only on distances, which are equal within a document."""
    settings = PACKED | {"position_embedding_type": position_embedding_type, "reset_attention_mask": False}
    with_positions, _ = _losses(settings)
    without, _ = _losses(settings | {"reset_position_ids": False})
    assert abs(with_positions / without - 1) > 1e-3


def test_a_step_reaches_every_weight() -> None:
    run = tiny_run(fp64=True, position_embedding_type="rope", init_method_std=0.3, **PACKED)
    run.data_parallel.zero_grad()
    batches = run.micro_batches(run.loader(RaggedDataset(61, 16, EOD)).step(0, run.step_after(0).num_microbatches))
    forward_backward(run, StepWork(run.plans.training(len(batches)), forward_step(run, batches), count_tokens(batches)))
    run.data_parallel.finish_grad_sync()
    for name, parameter in run.stages[0].named_parameters():
        if "linear_qkv.bias" not in name:
            assert parameter.main_grad.abs().amax() > 1e-11, name  # 1e-9 of a sum over up to 128 tokens
