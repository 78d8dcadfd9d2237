"""Distillation: the student learns the teacher's distribution of each token (``tensor_parallel/distillation.py``).

The teacher computes all micro-batches of a step before the student. Of each micro-batch only the input of its output
layer is kept; its logits, which are larger by V / h, are computed when the student's logits are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_core.models.gpt.model import HeadOptions, LogitLoss
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.pipeline_parallel.executor import ForwardStep
from megatron_core.tensor_parallel.distillation import vocab_parallel_distillation_loss
from megatron_core.training.driver import PipelineRank, run_plan
from megatron_core.training.setup import Run, message_format
from megatron_core.training.teacher import Teacher

Report = Callable[[Tensor, Tensor], None]
"""Receives the divergence of a micro-batch's tokens and their mask, each ``[b, n]``."""


@torch.no_grad()
def teacher_hidden_states(
    run: Run, teacher: Teacher, forward: ForwardStep, num_microbatches: int, lengths: Mapping[int, int]
) -> dict[int, Tensor]:
    """Inputs of the teacher's output layer by micro-batch; empty on ranks without the last stage.

    ``forward`` computes with the teacher's stages and returns them on the last stage.
    """
    found: dict[int, Tensor] = {}
    last = len(run.layers) - 1

    def keep(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        output = forward(stage, micro, hidden)
        assert isinstance(output, Tensor), "a GPT sends one tensor"
        if stage == last:
            found[micro] = output
            return output.new_zeros(())
        return output

    message = message_format(teacher.config, run.split, run.world.device)
    pipeline = PipelineRank(p2p=run.p2p, message=message, overlap_p2p=run.overlap_p2p)
    run_plan(pipeline, run.plans.evaluation(num_microbatches), keep, lengths=lengths)
    return found


def logit_losses(
    run: Run, teacher: Teacher, hidden: dict[int, Tensor], batches: Sequence[MicroBatch], report: Report | None
) -> dict[int, LogitLoss]:
    """The loss of the student's logits of each micro-batch in ``hidden``, which it releases; see ``Report``."""
    tuning, last = run.config.tuning, len(run.layers) - 1

    def of(micro: int) -> LogitLoss:
        def loss(logits: Tensor, target: Tensor) -> Tensor:
            batch = batches[micro]
            with torch.no_grad():
                last_stage, only = teacher.model.stages[last], HeadOptions(only_output_layer=True)
                theirs = last_stage(batch.tokens, hidden_states=hidden.pop(micro), head=only)
            losses, divergence = vocab_parallel_distillation_loss(
                logits,
                theirs,
                target,
                weight=tuning.kd_weight,
                temperature=tuning.kd_temperature,
                tp_group=run.groups.group("tp"),
                vocab_size=run.vocab_size,
            )
            if report is not None:
                report(divergence.transpose(0, 1), batch.loss_mask)
            return losses

        return loss

    return {micro: of(micro) for micro in hidden}
