"""Distillation: the student learns the teacher's distribution of each token (``loss.py``).

The teacher computes all micro-batches of a step before the student. Of each micro-batch only the input of its output
layer is kept; its logits, which are larger by V / h, are computed when the student's logits are known.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_core.features.distillation.loss import vocab_parallel_distillation_loss
from megatron_core.features.distillation.settings import DistillationConfig
from megatron_core.features.distillation.teacher import Teacher, build_teacher
from megatron_core.features.preferences.frozen import last_outputs
from megatron_core.models.gpt.model import HeadOptions, LogitLoss
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.driver import PipelineRank
from megatron_core.training.objective import LossReport, Objective, StepLoss
from megatron_core.training.setup import Run, message_format


class Distillation(Objective):
    """The mean over tokens of cross entropy and the divergence from a teacher; cross entropy alone in evaluations."""

    num_sums = 2

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run: Run = run
        self.teacher = None if run.config.training.skip_train else build_teacher(run)

    def step_loss(self, batches: Sequence[MicroBatch], report: LossReport | None = None) -> StepLoss:
        """The loss of tokens; the teacher computes all micro-batches before the student."""
        plain = super().step_loss(batches, report)
        evaluates = not all(stage.training for stage in self.run.stages.values())
        if self.teacher is None or evaluates:
            return plain
        hidden = teacher_hidden_states(self.run, self.teacher, batches)
        return replace(plain, logit_losses=logit_losses(self.run, self.teacher, hidden, batches, report))

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean divergence from the teacher."""
        if self.teacher is None:
            return {}
        divergence, tokens = sums
        return {"kd loss": divergence / max(tokens, 1.0)}


def teacher_hidden_states(run: Run, teacher: Teacher, batches: Sequence[MicroBatch]) -> dict[int, Tensor]:
    """Inputs of the teacher's output layer by micro-batch; empty on ranks without the last stage."""
    message = message_format(teacher.config, run.split, run.world.device)
    pipeline = PipelineRank(p2p=run.p2p, message=message, overlap_p2p=run.overlap_p2p)
    stages = teacher.model.stages
    return last_outputs(run, stages, batches, lambda _, output: output, pipeline, before_output_layer=True)


@torch.no_grad()
def teacher_logits(run: Run, teacher: Teacher, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """This rank's columns of the teacher's logits, from the input of its output layer."""
    last_stage = teacher.model.stages[len(run.layers) - 1]
    return last_stage(batch.tokens, hidden_states=hidden, head=HeadOptions(only_output_layer=True))


def logit_losses(
    run: Run, teacher: Teacher, hidden: dict[int, Tensor], batches: Sequence[MicroBatch], report: LossReport | None
) -> dict[int, LogitLoss]:
    """The loss of the student's logits of each micro-batch in ``hidden``, which it releases."""
    settings = run.config.section(DistillationConfig)

    def of(micro: int) -> LogitLoss:
        def loss(logits: Tensor, target: Tensor) -> Tensor:
            batch = batches[micro]
            losses, divergence = vocab_parallel_distillation_loss(
                logits,
                teacher_logits(run, teacher, batch, hidden.pop(micro)),
                target,
                weight=settings.kd_weight,
                temperature=settings.kd_temperature,
                tp_group=run.groups.group("tp"),
                vocab_size=run.vocab_size,
            )
            if report is not None:
                divergences = (divergence.transpose(0, 1) * batch.loss_mask).sum(dtype=torch.float64)
                report.add_terms(torch.stack([divergences, batch.loss_mask.sum(dtype=torch.float64)]))
            return losses

        return loss

    return {micro: of(micro) for micro in hidden}
