"""Losses and gradient norms of a tiny run as constants, so that a release cannot change them unnoticed.

Computed by ``_train`` in this file in one process, in float64. Nothing depends on a random generator of torch or numpy,
whose streams may change: weights are a formula, tokens and dropout masks are integer hashes. Only a different order of
sums can change them, by about 1e-15. After an intended change of the arithmetic, print ``_train({})`` and replace them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_core.parallel.sharding import spec_of
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

SETTINGS = {
    "fp64": True,
    "hidden_size": 16,
    "vocab_size": 29,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "micro_batch_size": 1,
    "clip_grad": 0.5,
    "lr_warmup_iters": 2,
}
LOSSES = [3.7274976815993575, 3.7827191899064374, 3.5638082742927004, 3.511697212227735]
NORMS = [1.0913812446974802, 1.0123564439433834, 0.8973294351011489, 0.7531658899272794]


def _fill(run: Run) -> None:
    """Each weight is 0.3 sin(i^2 + n) for its index i in the whole tensor n; those of norms are around 1."""
    for stage in run.stages.values():
        for number, (name, parameter) in enumerate(sorted(stage.named_global_parameters())):
            shape = spec_of(parameter).global_shape
            values = 0.3 * np.sin(np.arange(np.prod(shape), dtype=np.float64) ** 2 + number).reshape(shape)
            whole = torch.from_numpy(values + ("norm.weight" in name))
            spec_of(parameter).localise(whole, parameter.data)


def _train(settings: dict) -> tuple[list[float], list[float]]:
    run = tiny_run(**SETTINGS | settings)
    _fill(run)
    results = [train_step(run) for _ in range(4)]
    return [result.loss for result in results], [result.grad_norm for result in results]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (2, {}), (2, {"zero_stage": 1}), (2, {"zero_stage": 2})],
    ids=["one process", "dp2", "dp2 zero1", "dp2 zero2"],
)
def test_golden_losses_and_norms(ranks: int, settings: dict) -> None:  # C38
    for losses, norms in run_ranks(ranks, _train, settings):
        assert losses == pytest.approx(LOSSES, rel=1e-10)
        assert norms == pytest.approx(NORMS, rel=1e-10)
