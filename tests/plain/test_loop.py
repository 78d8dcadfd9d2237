"""The loop around steps: evaluations are the plain mean of losses, and skipped iterations leave out their samples."""

from __future__ import annotations

import pytest
import torch

from megatron_core.parallel import World
from megatron_core.training.pretrain import Job
from megatron_core.training.step import evaluate
from tests.plain.attention import Sequences
from tests.plain.engine import BASE, BOUND, Samples, engine_trace, samples_of, settings_of, start_of, started
from tests.plain.experts import Collected
from tests.plain.model import cross_entropy, hidden_states, logits_of
from tests.plain.rows import ROWS, Values
from tests.plain.training import train

ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("row", ["llama", "dropout", "capacity", "jitter", "later tokens", "z-loss"])
@pytest.mark.parametrize("size", [None, 6])
def test_evaluation(row: str, size: int | None) -> None:
    """The mean over the tokens that count, without dropout, jitter and the losses of layers."""
    values: Values = ROWS[row] | {"eval_global_batch_size": size, "eval_iters": 2}
    samples = samples_of(BASE | values, 2 * (size or 4))
    found = evaluate(started(values, ALONE), Samples(samples), 2)
    settings = settings_of(values | {"moe_input_jitter_eps": None})
    weights = start_of(engine_trace(values, 0))
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    place = torch.arange(settings.seq_length).expand_as(batch["tokens"])
    seq = Sequences(place, torch.zeros_like(place), settings.seq_length)
    collected = Collected(batch["mask"], settings.micro_batch_size)
    losses = cross_entropy(
        logits_of(settings, weights, hidden_states(settings, weights, batch["tokens"], seq, collected)),
        batch["labels"],
    )
    expected = (losses * batch["mask"]).sum() / batch["mask"].sum()
    assert found == pytest.approx(expected.item(), rel=BOUND)


def test_skipped_iterations() -> None:
    """Their samples are not used, and schedules do not count them."""
    values: Values = ROWS["llama"] | {"train_iters": 4, "eval_iters": 0, "num_workers": 0, "lr_warmup_iters": 2}
    run = started(values | {"iterations_to_skip": (2,)}, ALONE)
    Job().train(run)
    samples = samples_of(BASE | values, 16)
    record = train(settings_of(values), start_of(engine_trace(values, 0)), samples[:4] + samples[8:], 3)
    for name, parameter in run.stages[0].named_global_parameters():
        expected = record.weights[name]
        torch.testing.assert_close(parameter.detach()[: len(expected)], expected, rtol=BOUND, atol=1e-12)
