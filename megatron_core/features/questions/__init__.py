"""Evaluation on multiple-choice questions."""

from megatron_core.feature import Feature
from megatron_core.features.questions.settings import QuestionConfig, has_questions, question_problems

QUESTIONS = Feature(
    name="questions",
    settings=QuestionConfig,
    is_used=has_questions,
    problems=question_problems,
    evaluation="megatron_core.features.questions.scores:Questions",
)
