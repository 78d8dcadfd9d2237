"""Settings of multiple-choice questions, and their rule."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config.rule_helpers import shown
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import section, setting


@dataclass(frozen=True, kw_only=True)
@section()
class QuestionConfig:
    """Evaluation on multiple-choice questions."""

    choices_data_path: tuple[str, ...] = setting((), when=c.EVALUATION)
    """JSON Lines with multiple-choice questions: query, choices, and gold, the index of the correct choice. Each
    evaluation reports the accuracy by log-likelihood, as lm-eval's acc and acc_norm (per character, without a
    space at the beginning of a choice)."""


def has_questions(config: RunConfig) -> bool:
    """Whether evaluations include questions."""
    return bool(config.section(QuestionConfig).choices_data_path)


def question_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Questions need a tokenizer."""
    paths = config.section(QuestionConfig).choices_data_path
    if paths and config.data.tokenizer is None:
        yield f"choices_data_path={shown(paths)} has texts, and tokenizer_type=None; give a tokenizer"
