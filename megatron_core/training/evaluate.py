"""The mean loss over a fixed part of a split, with nothing of the training touched."""

from __future__ import annotations

import torch

from megatron_core.datasets import Dataset
from megatron_core.pipeline_parallel.executor import Executor
from megatron_core.training.setup import Run
from megatron_core.training.step import forward_step, message_of, sum_of, sum_over_ranks, to_device
from megatron_core.training.step_size import StepSize


@torch.no_grad()
def evaluate(run: Run, dataset: Dataset, iterations: int) -> float:
    """Sum of token losses / number of tokens over the first ``iterations`` global batches of ``dataset``.

    The same batches every time, so that evaluations can be compared. No dropout, no generator, no counter moves.
    """
    for stage in run.stages.values():
        stage.eval()
    loader = run.loader(dataset)
    loss = tokens = 0.0
    size = StepSize.of_evaluation(run.config, run.groups.size("dp"))
    posted = run.plans.evaluation(size.num_microbatches)
    for iteration in range(iterations):
        batches = to_device(loader.step(iteration * size.batch_size, size.num_microbatches), run.world.device)
        forward = forward_step(run, batches, 1.0)
        executor = Executor(posted.plan, run.links, message_of(run, batches), forward, posting=posted.posting)
        losses = executor.run()
        loss += sum_of(losses)
        tokens += sum(batches[micro]["loss_mask"].sum().item() for micro in losses)
    for stage in run.stages.values():
        stage.train()
    loss, tokens = sum_over_ranks(run, [run.counts * loss, run.counts * tokens])
    return loss / max(tokens, 1.0)
