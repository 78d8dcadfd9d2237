"""Rules for multiple-choice questions."""

from collections.abc import Iterator

from megatron_core.config.rule_helpers import shown
from megatron_core.config.run import RunConfig
from megatron_core.features.questions.settings import QuestionConfig


def question_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Questions need a tokenizer."""
    paths = config.section(QuestionConfig).choices_data_path
    if paths and config.data.tokenizer is None:
        yield f"choices_data_path={shown(paths)} has texts, and tokenizer_type=None; give a tokenizer"
