"""Layouts with context parallelism compute what one process computes."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_core.config import RunConfig
from megatron_core.datasets.base import Sample
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import set_up
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.bounds import FLOAT64_BOUND, Bounds, relative_errors
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.verify.trace import RankTrace, Trace, assemble
from tests.parity.context_rows import CONTEXT_ROWS, CP2, CP4, HEADS, SMALL
from tests.parity.every_row import drawn
from tests.parity.rows import BASE, SP, TP2, compare
from tests.parity.test_matrix import faults
from tests.sample import WHOLE_MATRIX


@pytest.mark.drawn(4)
@pytest.mark.parametrize("row", drawn(CONTEXT_ROWS))
def test_layout_computes_what_one_process_computes(row: str) -> None:
    found, baseline = compare(*CONTEXT_ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []


class OneToken(RaggedDataset):
    """Each batch of four sequences has one unmasked token, in the first chunk."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        mask = np.zeros_like(sample["loss_mask"])
        mask[1] = index % 4 == 1
        return Sample(tokens=sample["tokens"], labels=sample["labels"], loss_mask=mask)


def _train(settings: dict) -> tuple[RankTrace, float]:
    """Two steps, and an evaluation."""
    run = set_up(RunConfig.from_flat(settings), this_world())
    data = OneToken(run.vocab_size, run.config.data.seq_length)
    run.train_loader = run.loader(data)
    trace = RankTrace()
    hooks = StepHooks(before_update=lambda: trace.add_gradients(run.data_parallel, run.state.iteration))
    for _ in range(2):
        result = train_step(run, hooks=hooks)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.add_weights(run.data_parallel, run.stages.values())
    return trace, evaluate(run, data, 2)


def _trained(world_size: int, settings: dict) -> tuple[Trace, float]:
    traces, evaluated = zip(*run_ranks(world_size, _train, BASE | SMALL | settings), strict=True)
    assert len(set(evaluated)) == 1
    return assemble(traces), evaluated[0]


@pytest.mark.parametrize(
    ("size", "layout"), [(2, CP2), (4, CP4), (4, CP2 | TP2 | SP | HEADS)] if WHOLE_MATRIX else [(2, CP2)], ids=str
)
def test_all_tokens_that_count_lie_on_one_rank(size: int, layout: dict) -> None:  # C3 C4
    """Means over a rank's own tokens, averaged, would halve the gradients (Megatron-LM's PR 7513)."""
    (alone, expected), (found, evaluated) = _trained(1, {}), _trained(size, layout)
    assert found.faults == []
    assert max(relative_errors(found, alone).values()) < FLOAT64_BOUND
    assert evaluated == pytest.approx(expected, rel=1e-12)
