"""The loss of a step for an objective of tokens, on this rank's micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.features.experts.replay import RouterReplay
from megatron_core.features.output_losses.chunked_loss import linear_cross_entropy
from megatron_core.models.gpt.model import LogitLoss
from megatron_core.ops.rows import wide
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.post_training.entropy import TemperedLoss, vocab_parallel_entropy
from megatron_core.post_training.objectives import TokenObjective
from megatron_core.post_training.token_batch import TokenBatch
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy
from megatron_core.tensor_parallel.cross_entropy import VocabularyLoss
from megatron_core.tensor_parallel.linear_comm import LinearComm
from megatron_core.training.objective import LossReport, Objective, StepLoss
from megatron_core.training.setup import Run


class Scores:
    """Log-probabilities of tokens at a temperature, with their entropy on request, from a rank's logits."""

    def __init__(self, run: Run, *, temperature: float, with_entropy: bool) -> None:
        self._run = run
        self._temperature = temperature
        self.with_entropy = with_entropy
        self.entropies: dict[int, Tensor] = {}
        """``[b, n]`` by micro-batch."""

    def logit_losses(self, num_micro_batches: int) -> dict[int, LogitLoss]:
        """The loss of logits by micro-batch; empty if the model's own cross entropy has the same result."""
        if self._temperature == 1.0 and not self.with_entropy:
            return {}
        return {micro: MicroBatchLoss(self, micro) for micro in range(num_micro_batches)}

    def losses(self, micro: int, logits: Tensor, target: Tensor) -> Tensor:
        """-log softmax(z / temperature) at the target, ``[s, b]``."""
        run = self._run
        group = run.groups.group("tp")
        if self._temperature != 1.0:
            logits = logits / self._temperature
        if self.with_entropy:
            self.entropies[micro] = vocab_parallel_entropy(logits, group, run.vocab_size).transpose(0, 1)
        return vocab_parallel_cross_entropy(
            logits,
            target,
            tp_group=group,
            vocab_size=run.vocab_size,
            backend=run.config.model.kernel_backend,
            num_parts=run.data_parallel.settings.arithmetic.parts_on(group),
        )

    def losses_in_chunks(
        self, micro: int, hidden: Tensor, weight: nn.Parameter, target: Tensor, comm: LinearComm
    ) -> Tensor:
        """As ``losses`` of the output layer's logits, of which a few tokens' are in memory at a time."""
        run = self._run
        vocabulary = VocabularyLoss.of(len(weight), run.vocab_size, 0.0, comm.group, run.config.model.kernel_backend)
        settings: dict[str, Any] = vars(vocabulary) | {"temperature": self._temperature, "dtype": wide(weight.dtype)}
        loss = TemperedLoss(with_entropy=self.with_entropy, **settings)
        losses = linear_cross_entropy(hidden, weight, target, comm, loss=loss)
        if self.with_entropy:
            losses, entropies = losses.unbind(-1)
            self.entropies[micro] = entropies.transpose(0, 1)
        return losses


@dataclass(frozen=True)
class MicroBatchLoss:
    """The ``LogitLoss`` of a micro-batch, from complete logits or in chunks of them."""

    scores: Scores
    micro: int

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits ``[s, b, v/tp]`` -> losses ``[s, b]``."""
        return self.scores.losses(self.micro, logits, target)

    def in_chunks(self, hidden: Tensor, weight: nn.Parameter, target: Tensor, comm: LinearComm) -> Tensor:
        """Input of the output layer ``[s, b, h]`` -> losses ``[s, b]``."""
        return self.scores.losses_in_chunks(self.micro, hidden, weight, target, comm)


class Values(Scores):
    """Values of tokens by a model with a value head, in place of log-probabilities."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, temperature=1.0, with_entropy=False)

    def logit_losses(self, num_micro_batches: int) -> dict[int, LogitLoss]:
        """The values with the sign of losses, which are negative log-probabilities."""
        return dict.fromkeys(range(num_micro_batches), lambda values, target: -values.squeeze(-1))


class PolicyLoss(Objective):
    """A ``TokenObjective`` as the objective of one step.

    The engine divides a step's loss by the number of learned tokens, which auxiliary losses of experts also need;
    ``weights`` turn this mean into the mean of the objective.
    """

    def __init__(
        self,
        run: Run,
        objective: TokenObjective,
        tokens: Sequence[TokenBatch],
        weights: Sequence[Tensor],
        scores: Scores,
        router_replays: Mapping[int, RouterReplay],
    ) -> None:
        """``tokens``, ``weights`` ``[b, n]`` and ``router_replays``: by micro-batch of this rank."""
        super().__init__(run)
        self._objective = objective
        self._tokens = tokens
        self._weights = weights
        self._scores = scores
        self._router_replays = router_replays
        self.num_sums = len(objective.metric_names) + 1

    def step_loss(self, batches: Sequence[MicroBatch], report: LossReport | None = None) -> StepLoss:
        """See ``Objective.step_loss``."""
        arithmetic = self.run.data_parallel.settings.arithmetic

        def sum_losses(micro: int, output: Tensor) -> Tensor:
            batch = self._tokens[micro]
            if micro in self._scores.entropies:
                batch = replace(batch, entropy=self._scores.entropies.pop(micro))
            # Log-probabilities are negative losses of the model; divergences are losses.
            numbers = output if self._objective.reads == "divergences" else -output
            losses = self._objective(numbers, batch)
            if report is not None:
                sums = [batch.reported.pop(name).double() for name in self._objective.metric_names]
                report.add_terms(torch.stack([batch.mask.sum(dtype=torch.float64), *sums]))
            # Masked tokens must not count even if their values are not finite.
            weighted = (losses * self._weights[micro]).where(batch.mask > 0, 0.0)
            return arithmetic.loss_sum(weighted)

        return StepLoss(sum_losses, self._scores.logit_losses(len(batches)), self._router_replays)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Means over the learned tokens of the global batch."""
        tokens, *totals = sums
        return {
            name: total / max(tokens, 1.0) for name, total in zip(self._objective.metric_names, totals, strict=True)
        }
