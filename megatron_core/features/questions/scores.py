"""Accuracy of multiple-choice questions during training, from the log-likelihoods of their choices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.datasets.base import short_names
from megatron_core.features.questions.dataset import ChoiceDataset
from megatron_core.features.questions.settings import QuestionConfig
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.tokenizers import Tokenizer
from megatron_core.training.driver import run_plan
from megatron_core.training.objective import log_probs
from megatron_core.training.parts import Evaluation
from megatron_core.training.plans import StepSize
from megatron_core.training.setup import Run
from megatron_core.training.step import message_lengths, model_step


@dataclass(frozen=True)
class ChoiceScores:
    """The result of an evaluation."""

    loss: float
    """Mean negative log-likelihood of the correct choices."""
    accuracy: float
    """Share of questions whose most likely choice is correct: lm-eval's acc."""
    accuracy_norm: float
    """As ``accuracy``, with the log-likelihood per character of the choice, without a space at its beginning:
    lm-eval's acc_norm."""


class Questions(Evaluation):
    """Accuracy and loss on each file of questions."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None) -> None:
        assert tokenizer is not None, "the rules ask for one"
        paths = config.section(QuestionConfig).choices_data_path
        names = short_names([str(Path(path).with_suffix("")) for path in paths])
        self.datasets = {
            name: ChoiceDataset(path, tokenizer, config.data.seq_length)
            for name, path in zip(names, paths, strict=True)
        }

    def results(self, run: Run) -> Iterator[tuple[str, Mapping[str, float]]]:
        """See ``Evaluation.results``."""
        for name, dataset in self.datasets.items():
            yield f"questions {name}", vars(evaluate_choices(run, dataset))


@torch.no_grad()
def log_likelihoods(run: Run, dataset: ChoiceDataset) -> Tensor:
    """The log-likelihood of each choice, float64 ``[choices]`` in host memory, equal on all ranks.

    Evaluation uses no dropout and changes neither generators nor counters.
    """
    stages = list(run.stages.values())
    final = len(run.layers) - 1
    for stage in stages:
        stage.eval()
    loader = run.loader(dataset)
    size = StepSize.of_evaluation(run.config, run.groups.replicas)
    iterations = -(-len(dataset) // size.batch_size)
    sums = torch.zeros(iterations * size.batch_size, dtype=torch.float64, device=run.world.device)
    for iteration in range(iterations):
        batches = run.micro_batches(loader.step(iteration * size.batch_size, size.num_microbatches))
        compute = model_step(run, run.stages, batches, None)

        def forward(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
            output = compute(stage, micro, hidden)  # noqa: B023 (called in this iteration)
            if stage < final:
                return output
            batch = batches[micro]  # noqa: B023
            scores = log_probs(output, batch)
            if run.split.owns_loss:
                sums.index_add_(0, batch.sample_index, scores.to(sums.dtype))
            return scores.sum()

        run_plan(run, run.plans.evaluation(size.num_microbatches), forward, lengths=message_lengths(batches))
    for stage in stages:
        stage.train()
    all_reduce_(sums, run.groups.group(WORLD))
    return sums[: len(dataset)].cpu()


def evaluate_choices(run: Run, dataset: ChoiceDataset) -> ChoiceScores:
    """Compare the log-likelihoods of the choices of each question. Source: EleutherAI's lm-eval, multiple_choice."""
    scores = log_likelihoods(run, dataset).split([len(lengths) for lengths in dataset.lengths])
    correct = [likelihoods[gold].item() for likelihoods, gold in zip(scores, dataset.gold, strict=True)]
    per_character = [
        likelihoods / torch.tensor(lengths, dtype=likelihoods.dtype).clamp_min(1)
        for likelihoods, lengths in zip(scores, dataset.lengths, strict=True)
    ]
    return ChoiceScores(
        -sum(correct) / len(correct), _accuracy(scores, dataset.gold), _accuracy(per_character, dataset.gold)
    )


def _accuracy(scores: Sequence[Tensor], gold: Sequence[int]) -> float:
    return sum(int(likelihoods.argmax()) == right for likelihoods, right in zip(scores, gold, strict=True)) / len(gold)
