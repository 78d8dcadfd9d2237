"""The questions of a run, as a part of its evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_core.config import RunConfig
from megatron_core.datasets.base import short_names
from megatron_core.features.questions.dataset import ChoiceDataset
from megatron_core.features.questions.scores import evaluate_choices
from megatron_core.features.questions.settings import QuestionConfig
from megatron_core.tokenizers import Tokenizer
from megatron_core.training.parts import Evaluation
from megatron_core.training.setup import Run


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
