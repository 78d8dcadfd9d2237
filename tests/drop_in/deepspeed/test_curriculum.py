"""``curriculum_learning`` against the difficulties that DeepSpeed's scheduler and its documentation name."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed.compare import describe_ranks
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


# Samples by metrics: data_efficiency.

SAMPLES, MICRO_BATCHES = 120, 60
LENGTHS = np.random.default_rng(1).integers(2, 9, SAMPLES)
RARITY = np.random.default_rng(2).permutation(SAMPLES)
GROWING = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 12, "difficulty_step": 1}}
SEQLEN = {"difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 2, "max_difficulty": 8}
VOCAB = {"difficulty_type": "percentile", "clustering_type": "schedule_based", "min_difficulty": 6, "max_difficulty": 9}
METRICS: dict[str, dict[str, Any]] = {"seqlen": {**SEQLEN, **GROWING}, "vocabularyrarity": {**VOCAB, **GROWING}}
SINGLE = {**METRICS["seqlen"], "clustering_type": "single_cluster"}


def _section(folder: str, metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    for name, metric in metrics.items():
        for kind in ("sample", "metric"):
            metric[f"index_to_{kind}_path"] = str(Path(folder, f"{name}_to_{kind}"))
    learning = {"enabled": True, "curriculum_metrics": metrics}
    return {"enabled": True, "seed": 7, "data_sampling": {"enabled": True, "curriculum_learning": learning}}


def write_metrics(folder: str) -> None:
    """Write the files of DeepSpeed's data analyzer, by its own writer."""
    from deepspeed.runtime.data_pipeline.data_sampling import utils  # type: ignore[import-not-found]

    for name, values in (("seqlen", LENGTHS), ("vocabularyrarity", RARITY)):
        rows = [(value, np.flatnonzero(values == value)) for value in np.unique(values)]
        # DeepSpeed's types above int64 have other codes than Megatron-LM's.
        for kind, position, dtype in (("metric", 0, np.uint16), ("sample", 1, np.uint64)):
            path = str(Path(folder, f"{name}_to_{kind}"))
            builder = utils.create_mmap_dataset_builder(path, dtype)
            for row in rows:
                builder.add_item_numpy(np.atleast_1d(row[position]).astype(dtype))
            utils.close_mmap_dataset_builder(builder, path)


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


def drawn(section: dict[str, Any], accumulation: int) -> list[list[int]]:
    """The samples of this rank's micro-batches, by the package ``deepspeed`` of this process."""
    describe_ranks()
    loader = _engine(section, accumulation).training_dataloader
    return [batch[:, 0].int().tolist() for batch in islice(loader, MICRO_BATCHES)]


def _engine(section: dict[str, Any], accumulation: int = 1) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "data_efficiency": section,
    }
    return deepspeed.initialize(model=nn.Linear(4, 4), config=config, training_data=_Numbers())[0]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Files of metrics that DeepSpeed wrote."""
    if not REFERENCE.exists():
        pytest.skip("needs DeepSpeed")
    folder = str(tmp_path_factory.mktemp("metrics"))
    ask(Task("tests.drop_in.deepspeed.test_curriculum:write_metrics", (folder,)))
    return folder


@pytest.mark.parametrize("accumulation", (1, 3))
@pytest.mark.parametrize("chosen", ("seqlen", "vocabularyrarity", "both", "single"))
def test_samples_of_a_curriculum_are_deepspeeds(chosen: str, accumulation: int, metrics: str, tmp_path: Path) -> None:
    by_name = {"both": METRICS, "single": {"seqlen": SINGLE}}
    section = _section(metrics, by_name.get(chosen) or {chosen: METRICS[chosen]})
    section["data_sampling"]["curriculum_learning"]["data_cluster_path"] = str(tmp_path)  # DeepSpeed's files
    theirs = ask(Task("tests.drop_in.deepspeed.test_curriculum:drawn", (section, accumulation), 2))
    ours = run_ranks(2, drawn, section, accumulation)[0]
    assert ours == theirs
    if chosen == "seqlen":
        assert max(LENGTHS[ours[0]]) <= 2 and max(max(LENGTHS[samples]) for samples in ours) == 8


def test_a_curriculum_continues_from_a_checkpoint(metrics: str, tmp_path: Path) -> None:
    make = partial(_engine, _section(metrics, METRICS))
    engine, batches = make(), []
    for batch in islice(engine.training_dataloader, 14):
        engine.backward(engine(batch).square().mean())
        engine.step()
        batches.append(batch)
        if len(batches) == 8:
            engine.save_checkpoint(str(tmp_path))
    other = make()
    other.set_data_post_process_func(lambda batch, state: (batch, state["current_difficulties"]["seqlen"]))
    other.load_checkpoint(str(tmp_path))
    continued = list(islice(other.training_dataloader, 6))
    assert all(torch.equal(a, b) for a, (b, _) in zip(batches[8:], continued, strict=True))
    assert [length for _, length in continued] == [6, 7, 7, 8, 8, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"difficulty_type": "rank"}, "seqlen.difficulty_type='rank' must be 'value' or 'percentile'"),
        ({"index_to_metric_path": "absent"}, "index_to_metric_path='absent' cannot be read"),
        ({"index_to_metric_path": None}, "index_to_metric_path=None cannot be read"),
        ({"min_difficulty": 1, "max_difficulty": 1}, "too few samples have a difficulty up to"),
    ),
)
def test_wrong_curricula_are_errors(changes: dict[str, Any], message: str, metrics: str) -> None:
    section = _section(metrics, {"seqlen": METRICS["seqlen"]})
    metric = section["data_sampling"]["curriculum_learning"]["curriculum_metrics"]
    metric["seqlen"] = metric["seqlen"] | changes
    with pytest.raises(ConfigError, match=message):
        next(iter(_engine(section).training_dataloader))


def test_a_curriculum_without_training_data_is_named(metrics: str, caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_batch_size": 2, "data_efficiency": _section(metrics, METRICS)}
    with caplog.at_level("WARNING"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.utils.logger, "propagate", True)
        deepspeed.initialize(model=nn.Linear(4, 4), config=config)
    assert "curriculum_learning has no effect on loaders of the program" in caplog.text


@pytest.mark.parametrize(
    ("section", "message"),
    (
        ({"data_routing": {"random_ltd": {"enabled": True}}}, r"random_ltd\.enabled=True .* no layer drops tokens"),
        (
            {"data_sampling": {"dynamic_batching": {"enabled": True}}},
            r"dynamic_batching\.enabled=True .* batch_sampler",
        ),
    ),
)
def test_other_parts_of_data_efficiency_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _engine(section)
