"""Accuracy of multiple-choice questions during training, from the log-likelihoods of their choices."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.datasets.base import Sample, checked_text, short_names
from megatron_core.errors import DataError
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


class ChoiceDataset:
    """JSON Lines with ``query``, ``choices`` and ``gold``, the index of the correct choice.

    Item i is the i-th choice of all questions in turn; after the last one, samples without counted tokens. A choice
    follows its query directly, so that it usually begins with a space. Both are tokenized together, with white space at
    the end of the query as a part of the choice; too long texts lose tokens at their beginning, as in lm-eval.
    Errors: ``DataError``.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.gold: list[int] = []
        """The correct choice of each question."""
        self.lengths: list[list[int]] = []
        """The number of characters of each choice of each question, without a space at its beginning: lm-eval divides
        by the length of the choice without its ``target_delimiter``, which is a space."""
        self._tokens: list[tuple[list[int], int]] = []
        self._tokenizer = tokenizer
        self._padding = next((i for i in (tokenizer.pad, tokenizer.eod) if i is not None), 0)
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # texts may contain other line separators
        except (OSError, ValueError) as error:
            raise DataError(f"choices_data_path={path} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    self._add(json.loads(line))
                except (ValueError, TypeError, KeyError, RecursionError, DataError) as error:
                    raise DataError(
                        f"{path}, line {number}: {error}; a line is "
                        '{"query": "2 + 2 =", "choices": [" 3", " 4"], "gold": 1}'
                    ) from None
        if not self.gold:
            raise DataError(f"choices_data_path={path} has no questions")

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Sample:
        ids, counted = self._tokens[index % len(self._tokens)]
        size = self.sequence_length
        ids = ids[-size - 1 :]
        counted = 0 if index >= len(self._tokens) else min(counted, len(ids) - 1)
        mask = np.zeros(size, dtype=np.float32)
        mask[len(ids) - 1 - counted : len(ids) - 1] = 1.0
        filled = np.array(ids + [self._padding] * (size + 1 - len(ids)), dtype=np.int64)
        return {"tokens": filled[:-1], "labels": filled[1:], "loss_mask": mask}

    def _add(self, line: Any) -> None:
        query = checked_text(line["query"], "query")
        choices = line["choices"]
        gold = line["gold"]
        if not isinstance(choices, list) or len(choices) < 2:
            raise DataError("choices must be a list of two or more strings")
        if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
            raise DataError(f"gold={gold!r} must be an index of choices, from 0 to {len(choices) - 1}")
        self._tokens += [self._encoded(query, checked_text(choice, "choices")) for choice in choices]
        self.gold.append(gold)
        self.lengths.append([len(choice.removeprefix(" ")) for choice in choices])

    def _encoded(self, query: str, choice: str) -> tuple[list[int], int]:
        """The tokens of a query and a choice, and the number of tokens of the choice."""
        question = query.rstrip()
        tokens = self._tokenizer.tokenize(query + choice)
        if not question:  # the first token is predicted from the one that ends the document before it
            start = next((i for i in (self._tokenizer.eod, self._tokenizer.bos) if i is not None), None)
            if start is None:
                raise DataError("query is empty, and the tokenizer has no token before the first one; give a query")
            return [start, *tokens], len(tokens)
        counted = len(tokens) - len(self._tokenizer.tokenize(question))
        if counted < 1:
            raise DataError(f"the choice {choice!r} adds no tokens to its query")
        return tokens, counted


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
