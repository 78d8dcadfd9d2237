"""The losses in reports are those of Megatron-LM's log; its ``train_step`` and ``evaluate`` are written out here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.plans import StepSize
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import evaluate, model_step, train_step
from megatron_core.verify.ranks import run_ranks, this_world
from tests.plain.engine import BASE, Samples, samples_of, started

SETTINGS = {"calculate_per_token_loss": False, "micro_batch_size": 1, "context_parallel_size": 2}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def _of_conversations(folder: Path) -> Run:
    """A run with ``--sft`` on answers of different lengths."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes" * n}] for n in range(1, 17)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    data = {
        "sft": True,
        "mock_data": False,
        "data_path": (str(folder / "chats.jsonl"),),
        "split": "1,0,0",
        "chat_template": str(folder / "chat.jinja"),
        "tokenizer_type": "ByteLevelTokenizer",
        "vocab_size": None,
        "seq_length": 96,
        "position_embedding_type": "rope",
    }
    return set_up(RunConfig.from_flat(BASE | SETTINGS | data), this_world())


def _sums(run: Run, batches: list[MicroBatch]) -> Tensor:
    """Sum of the losses and number of the tokens of each micro-batch of this rank, ``[m, 2]``."""
    losses = model_step(run, run.stages, batches, None)
    with torch.no_grad():
        rows = [((losses(0, m, None) * b.loss_mask).sum(), b.loss_mask.double().sum()) for m, b in enumerate(batches)]
    return torch.tensor(rows, dtype=torch.float64)


def _over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def _mean_of_means(sums: Tensor) -> float:
    means = sums[:, 0] / sums[:, 1].clamp(min=1)
    return _over_ranks(means.mean()).item() / dist.get_world_size()


def _reports(folder: Path, is_sft: bool) -> dict[str, float]:
    run = _of_conversations(folder) if is_sft else started(SETTINGS, this_world())
    dataset = run.splits.train if is_sft else Samples(samples_of(BASE, 8))
    size = StepSize.of_evaluation(run.config, run.groups.replicas)
    loader = run.loader(dataset)
    evaluated = [_sums(run, run.micro_batches(loader.step(first, size.num_microbatches))) for first in (0, 4)]
    losses, tokens = sum(_over_ranks(sums.sum(0)) for sums in evaluated).tolist()
    values = {
        "evaluation": evaluate(run, dataset, 2),
        "evaluation by tokens": losses / tokens,
        "evaluation by means": sum(_mean_of_means(sums) for sums in evaluated) / 2,
    }
    step = run.step_after(0)
    trained = _sums(run, run.micro_batches(run.train_loader.step(0, step.num_microbatches, step.sequence_length)))
    losses, tokens = _over_ranks(trained.sum(0)).tolist()
    return values | {
        "by tokens": losses / tokens,
        "by means": _mean_of_means(trained),
        "step": train_step(run).loss,
    }


@pytest.mark.parametrize("is_sft", [False, True])
def test_reports_are_megatrons(tmp_path: Path, is_sft: bool) -> None:
    for values in run_ranks(4, _reports, tmp_path, is_sft):
        assert values["step"] == pytest.approx(values["by tokens"], rel=1e-12)
        assert abs(values["by means"] / values["by tokens"] - 1) > 1e-5
        expected = values["evaluation by means" if is_sft else "evaluation by tokens"]
        assert values["evaluation"] == pytest.approx(expected, rel=1e-12)
        assert abs(values["evaluation by means"] / values["evaluation by tokens"] - 1) > 1e-5
