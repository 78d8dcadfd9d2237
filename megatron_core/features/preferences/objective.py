"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

With x the prompt, y_w the chosen and y_l the rejected answer, and margin h = beta (log pi(y_w|x) / ref(y_w|x) - log
pi(y_l|x) / ref(y_l|x)), the loss of a pair is -(1 - e) log sigmoid(h) - e log sigmoid(-h) for label smoothing e. The
reference is the model without its adapters, or without adapters a frozen copy.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_core.features.lora.adapters import without_adapters
from megatron_core.features.preferences.frozen import FrozenModel, last_outputs, load_frozen
from megatron_core.features.preferences.settings import PreferenceConfig
from megatron_core.models import GPTModel
from megatron_core.parallel.collectives import paired
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.initial_weights import open_base
from megatron_core.training.objective import LossReport, Objective, StepLoss, log_probs
from megatron_core.training.setup import Run

Margins = Callable[[Tensor], None]
"""Receives the margins of a micro-batch's pairs."""


class Preferences(Objective):
    """The mean loss over pairs of answers."""

    num_sums = 3

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run: Run = run
        self.settings = run.config.section(PreferenceConfig)
        self.frozen = _load_reference(run) if run.config.optional("lora_rank") is None else None
        """The reference, if it is not the model without its adapters."""

    def count_terms(self, batches: Sequence[MicroBatch]) -> Tensor:
        """This rank's share of its micro-batches' pairs, a float64 scalar: context-parallel ranks share them."""
        pairs = sum(batch.tokens.shape[0] // 2 for batch in batches)
        count = pairs / self.run.groups.size("cp")
        return torch.full((), count, dtype=torch.float64, device=self.run.world.device)

    def step_loss(self, batches: Sequence[MicroBatch], report: LossReport | None = None) -> StepLoss:
        """The loss of pairs of answers; the reference computes all micro-batches before the model."""
        run = self.run
        settings = self.settings
        reference = reference_log_probs(run, run.stages if self.frozen is None else self.frozen.stages, batches)

        def add_margins(margins: Tensor) -> None:
            if report is not None:
                sums = margins.new_tensor(len(margins)), (margins > 0).sum(), margins.sum()
                report.add_terms(torch.stack([term.double() for term in sums]) / run.groups.size("cp"))

        def sum_losses(micro: int, output: Tensor) -> Tensor:
            return preference_loss(
                log_probs(output, batches[micro]),
                reference[micro],
                run.groups.group("cp"),
                settings.dpo_beta,
                settings.dpo_label_smoothing,
                add_margins,
            )

        return StepLoss(sum_losses)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The share of pairs whose chosen answer the model prefers more than the reference, and the mean margin."""
        pairs, wins, margin = sums
        return {"preference accuracy": wins / max(pairs, 1.0), "preference margin": margin / max(pairs, 1.0)}


def _load_reference(run: Run) -> FrozenModel:
    """The initial weights of the run, from --load-hf or --pretrained-checkpoint."""
    base = open_base(run.config, run.world.device)
    assert base is not None, "the rules require the weights of the reference"
    return load_frozen(run, run.config, run.layer_specs, base)


def reference_log_probs(run: Run, stages: Mapping[int, GPTModel], batches: Sequence[MicroBatch]) -> dict[int, Tensor]:
    """``log_probs`` of each micro-batch by the reference, whose ``stages`` may have adapters; empty on ranks without
    the last stage."""
    with without_adapters(list(stages.values())):
        return last_outputs(run, stages, batches, lambda micro, output: log_probs(output, batches[micro]))


def preference_loss(
    log_probs: Tensor, reference: Tensor, group: Group, beta: float, smoothing: float, report: Margins
) -> Tensor:
    """This rank's share of the sum of the losses of pairs; the sum over the context-parallel ``group`` is the loss.

    ``log_probs`` and ``reference`` ``[2 pairs]`` are the log-probabilities of this rank's tokens of chosen and rejected
    answers in turn.
    """
    ratios = paired(log_probs - reference, group, "sum", "sum")
    margins = beta * (ratios[0::2] - ratios[1::2])
    report(margins.detach())
    losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
    return losses.sum() / group.size()
