"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

With x the prompt, y_w the chosen and y_l the rejected answer, and margin h = beta (log pi(y_w|x) / ref(y_w|x) - log
pi(y_l|x) / ref(y_l|x)), the loss of a pair is -(1 - e) log sigmoid(h) - e log sigmoid(-h) for label smoothing e. The
reference is the model without its adapters, or without adapters a frozen copy (``training/reference.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import paired
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.pipeline_parallel.executor import ForwardStep
from megatron_core.training.driver import run_plan
from megatron_core.training.setup import Run
from megatron_core.transformer.adapters import without_adapters

Margins = Callable[[Tensor], None]
"""Receives the margins of a micro-batch's pairs."""


def log_probs(losses: Tensor, batch: MicroBatch) -> Tensor:
    """The sum of the log-probabilities of each sequence's counted tokens on this rank: ``[b, n]`` -> ``[b]``."""
    dtype = wide(losses.dtype)
    return -(losses.to(dtype) * batch.loss_mask.to(dtype)).sum(1)


def count_pairs(run: Run, batches: Sequence[MicroBatch]) -> Tensor:
    """This rank's share of its micro-batches' pairs, a float64 scalar: context-parallel ranks share them."""
    pairs = sum(batch.tokens.shape[0] // 2 for batch in batches)
    return torch.tensor(pairs / run.groups.size("cp"), dtype=torch.float64, device=run.world.device)


@torch.no_grad()
def reference_log_probs(
    run: Run, batches: Sequence[MicroBatch], forward: ForwardStep, stages: Sequence[nn.Module], lengths: dict[int, int]
) -> dict[int, Tensor]:
    """``log_probs`` of each micro-batch by the reference; empty on ranks without the last stage.

    ``forward`` computes with ``stages`` and returns a micro-batch's losses ``[b, n]`` on the last stage.
    """
    found: dict[int, Tensor] = {}
    last = len(run.layers) - 1
    modes = [stage.training for stage in stages]

    def keep(stage: int, micro: int, hidden: object) -> object:
        output = forward(stage, micro, hidden)
        if stage == last:
            found[micro] = log_probs(output, batches[micro])  # type: ignore[arg-type]
            return found[micro].sum()
        return output

    for stage in stages:
        stage.eval()
    with without_adapters(stages):
        run_plan(run, run.plans.evaluation(len(batches)), keep, lengths=lengths)  # type: ignore[arg-type]
    for stage, mode in zip(stages, modes, strict=True):
        stage.train(mode)
    return found


def preference_loss(
    own: Tensor, reference: Tensor, group: Group, beta: float, smoothing: float, report: Margins | None = None
) -> Tensor:
    """This rank's share of the sum of the losses of pairs; the sum over the context-parallel ``group`` is the loss.

    ``own`` and ``reference`` ``[2 pairs]`` are the log-probabilities of this rank's tokens of chosen and rejected
    answers in turn.
    """
    ratios = paired(own - reference, group, "sum", "sum")
    margins = beta * (ratios[0::2] - ratios[1::2])
    if report is not None:
        report(margins.detach())
    losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    return losses.sum() / group.size()
