"""``curriculum_learning`` against the difficulties that DeepSpeed's scheduler and its documentation name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from megatron_core.errors import ConfigError
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

SECTIONS: list[dict[str, Any]] = [
    {
        "min_difficulty": 2,
        "max_difficulty": 10,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
    },
    {
        "min_difficulty": 8,
        "max_difficulty": 61,
        "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 8, "root_degree": 2},
    },
    {
        "min_difficulty": 1,
        "max_difficulty": 5,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2, 3, 4, 5], "max_step": [2, 4, 6, 8]},
    },
]
STEPS = 25


def difficulties(sections: list[dict[str, Any]]) -> list[list[int]]:
    """The difficulty of each step, by the package ``deepspeed`` of this process."""
    from deepspeed.runtime.data_pipeline import curriculum_scheduler

    schedulers = [curriculum_scheduler.CurriculumScheduler(section) for section in sections]
    return [[scheduler.update_difficulty(step) for step in range(1, STEPS)] for scheduler in schedulers]


def test_a_linear_schedule() -> None:
    assert difficulties(SECTIONS[:1])[0][:9] == [2, 4, 4, 6, 6, 8, 8, 10, 10]


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_difficulties_are_deepspeeds() -> None:
    theirs = ask(Task("tests.drop_in.deepspeed.test_curriculum:difficulties", (SECTIONS,)))
    assert difficulties(SECTIONS) == theirs


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lengths: list[int | None] = []

    def forward(self, x: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        self.lengths.append(curriculum_seqlen)
        return self.linear(x[:, :curriculum_seqlen]).square().mean()


def test_the_model_gets_the_length_in_training() -> None:
    section = {"enabled": True, "curriculum_type": "seqlen", **SECTIONS[0]}
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "curriculum_learning": section,
    }
    engine = deepspeed.initialize(model=_Model(), config=config)[0]
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 10, 4)))
        engine.step()
    engine.eval()
    engine(torch.ones(1, 10, 4))
    assert engine.module.lengths == [2, 2, 4, 4, 4, 4, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"schedule_type": "cubic"}, "schedule_type='cubic' must be one of fixed_linear"),
        ({"max_difficulty": None}, r"curriculum_learning\.max_difficulty must be an integer"),
        ({"schedule_config": {}}, r"schedule_config\.total_curriculum_step must be an integer"),
    ),
)
def test_wrong_sections_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CurriculumScheduler({**SECTIONS[0], **changes})
