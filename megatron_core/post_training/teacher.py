"""Learning the distributions of a teacher at tokens that the student has sampled."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.features.distillation.objective import Distillation, teacher_hidden_states, teacher_logits
from megatron_core.features.distillation.teacher import Teacher
from megatron_core.models.gpt.model import LogitLoss
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import all_reduce_, copy_to_region, reduce_from_region
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.post_training.policy_loss import Scores
from megatron_core.training.setup import Run


def teacher_of(run: Run) -> Teacher:
    """The model of ``--kd-teacher``. Errors: ``ConfigError`` without one."""
    objective = run.objective
    if not isinstance(objective, Distillation) or objective.teacher is None:
        raise ConfigError("kd_teacher=None: there is no teacher; give its folder with --kd-teacher")
    return objective.teacher


class Divergences(Scores):
    """The divergence of each token's distribution from the teacher's, in place of log-probabilities."""

    def __init__(self, run: Run, batches: Sequence[MicroBatch], *, beta: float, temperature: float) -> None:
        super().__init__(run, temperature=temperature, with_entropy=False)
        self._beta = beta
        self._batches = batches
        self._teacher = teacher_of(run)
        self._hidden = teacher_hidden_states(run, self._teacher, batches)

    def logit_losses(self, num_micro_batches: int) -> dict[int, LogitLoss]:
        """The divergences by micro-batch."""
        return {micro: self._of(micro) for micro in self._hidden}

    def _of(self, micro: int) -> LogitLoss:
        run = self._run

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            of_teacher = teacher_logits(run, self._teacher, self._batches[micro], self._hidden.pop(micro))
            group = run.groups.group("tp")
            columns = logits.shape[-1]
            valid = min(max(run.vocab_size - group.rank() * columns, 0), columns)

            def heated(columns_of_rank: Tensor) -> Tensor:
                return columns_of_rank[..., :valid].to(wide(columns_of_rank.dtype)) / self._temperature

            return token_divergence(heated(logits), heated(of_teacher), self._beta, group)

        return loss


def token_divergence(student: Tensor, teacher: Tensor, beta: float, group: Group) -> Tensor:
    """beta KL(P || M) + (1 - beta) KL(Q || M) with the teacher's P, the student's Q and M = beta P + (1 - beta) Q.

    ``beta=0``: KL(P || Q); ``beta=1``: the reverse, KL(Q || P). Logits ``[s, b, v/tp]`` -> ``[s, b]``.
    Source: Agarwal et al. 2024 (GKD), arXiv 2306.13649, equation 1.
    """
    log_q = vocab_parallel_log_softmax(student, group)
    log_p = vocab_parallel_log_softmax(teacher, group)
    if beta == 0.0:
        terms = log_p.exp() * (log_p - log_q)
    elif beta == 1.0:
        terms = log_q.exp() * (log_q - log_p)
    else:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        terms = beta * log_p.exp() * (log_p - log_m) + (1.0 - beta) * log_q.exp() * (log_q - log_m)
    return reduce_from_region(terms.sum(-1), group)


def vocab_parallel_log_softmax(logits: Tensor, group: Group) -> Tensor:
    """log softmax of logits ``[..., v/tp]`` over the columns of all ranks of ``group``."""
    lowest = logits.new_full(logits.shape[:-1], -torch.inf)
    largest = logits.detach().amax(-1) if logits.shape[-1] else lowest
    all_reduce_(largest, group, maximum=True)
    shifted = logits - largest[..., None]
    # Every rank's log-probabilities depend on the whole sum, so its gradient is the sum of theirs.
    total = copy_to_region(reduce_from_region(shifted.exp().sum(-1), group), group)
    return shifted - total.log()[..., None]
