"""Steps on a teacher's distributions at sampled tokens equal those of trl's GKD in float64, in every kind of layout.

The steps of trl are stored (trl_1_16/make_files.py), so that the tests do not need it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, DataError
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.post_training import Trainer, Trajectory, objectives
from megatron_core.post_training.advantages import teacher_advantages
from megatron_core.verify.ranks import run_ranks, this_world
from tests.defects.plant import planted
from tests.post_training.test_critics import COMMON, LAYOUTS, Steps
from tests.post_training.trl_1_16 import critic_inputs
from tests.post_training.trl_1_16 import policy_inputs as inputs
from tests.training.trl_1_16.inputs import load_model, save_inputs

OF_TRL = json.loads((Path(inputs.__file__).parent / "divergence_steps.json").read_text())
DENSE = [name for name in LAYOUTS if "experts" not in name]
CASES = [(kind, layout) for layout in DENSE for kind in critic_inputs.DIVERGENCES]


def _config(root: Path, layout: str) -> RunConfig:
    for name in ("student", "teacher"):
        (root / name).mkdir()
    save_inputs(root / "student")
    critic_inputs.save_teacher(root / "teacher")
    folders = {"load_hf": str(root / "student"), "kd_teacher": str(root / "teacher")}
    return RunConfig.from_flat(config_of_folder(root / "student").flat() | COMMON | folders | LAYOUTS[layout])


def _texts(step: int) -> list[Trajectory]:
    mask = [0] * (inputs.PROMPT_LENGTH - 1)
    return [Trajectory([*a.prompt, *a.answer], mask + a.mask) for a in inputs.sampled(step)]


def _ranks(layout: str) -> int:
    return 1 if "one process" in layout else 2


def _steps(config: RunConfig, kind: str, pack: bool) -> Steps:
    trainer = Trainer(config, this_world(), pack=pack)
    settings = critic_inputs.DIVERGENCES[kind]
    objective = objectives.generalized_jsd(settings["beta"])
    results = []
    for step in range(inputs.STEPS):
        result = trainer.train_on(_texts(step), objective, temperature=settings.get("temperature", 1.0))
        results.append((result.loss, result.grad_norm))
    return results


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_steps_equal_those_of_trl(kind: str, layout: str, tmp_path: Path) -> None:
    config = _config(tmp_path, layout)
    for steps in run_ranks(_ranks(layout), _steps, config, kind, "rows of one" not in layout):
        for ours, theirs in zip(steps, OF_TRL[kind], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


@pytest.mark.parametrize(
    ("old", "new", "layout"),
    [
        ("copy_to_region(", "(lambda x, _: x)(", "tp2"),
        ("all_reduce_(largest", "(lambda *_, **__: None)(largest", "tp2 sp"),
    ],
)
def test_a_softmax_of_a_rank_is_found(old: str, new: str, layout: str, tmp_path: Path) -> None:
    config = _config(tmp_path, layout)
    with planted("post_training.teacher:vocab_parallel_log_softmax", old, new):
        (steps, _) = run_ranks(2, _steps, config, "jsd", True)
    assert any(ours != pytest.approx(theirs, rel=1e-6) for ours, theirs in zip(steps, OF_TRL["jsd"], strict=True))


def test_a_mean_over_the_other_distribution_is_found(tmp_path: Path) -> None:
    with planted("post_training.teacher:token_divergence", "terms = log_p.exp()", "terms = log_q.exp()"):
        (steps,) = run_ranks(1, _steps, _config(tmp_path, "one process"), "forward", True)
    assert any(ours != pytest.approx(theirs, rel=1e-6) for ours, theirs in zip(steps, OF_TRL["forward"], strict=True))


def _of_teacher(config: RunConfig) -> np.ndarray:
    trainer = Trainer(config, this_world())
    return torch.cat(trainer.teacher().log_probs(_texts(0)).log_probs).numpy()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", DENSE)
def test_log_probs_of_the_teacher_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    """It is wider than the student, and so are the messages between its stages."""
    config = _config(tmp_path, layout)
    model = load_model(tmp_path / "teacher").eval()
    expected = []
    for answer in inputs.sampled(0):
        ids = torch.tensor([[*answer.prompt, *answer.answer]])
        with torch.no_grad():
            rows = model(input_ids=ids).logits[0, inputs.PROMPT_LENGTH - 1 : -1].log_softmax(-1)
        chosen = rows.gather(1, torch.tensor(answer.answer)[:, None])[:, 0]
        expected.append(chosen[torch.tensor(answer.mask) > 0])
    for scores in run_ranks(_ranks(layout), _of_teacher, config):
        np.testing.assert_allclose(scores, torch.cat(expected).numpy(), rtol=1e-10)


def _on_policy(config: RunConfig) -> list[float]:
    """The mean reverse divergence of sampled tokens, before each step."""
    trainer = Trainer(config, this_world())
    teacher = trainer.teacher()
    means = []
    for _ in range(30):
        texts = _texts(0)
        scores = trainer.log_probs(texts).log_probs
        of_teacher = teacher.log_probs(texts).log_probs
        means.append(float((torch.cat(scores) - torch.cat(of_teacher)).mean()))
        trajectories = []
        for text, ours, theirs in zip(texts, scores, of_teacher, strict=True):
            values: dict[str, Any] = {"advantages": teacher_advantages(ours.tolist(), theirs.tolist())}
            trajectories.append(Trajectory(text.tokens, text.mask, values | {"old_log_probs": ours}))
        trainer.train_on(trajectories, objectives.importance_sampling(), lr=3e-3)
    return means


def test_on_policy_distillation_approaches_the_teacher(tmp_path: Path) -> None:
    (means,) = run_ranks(1, _on_policy, _config(tmp_path, "one process"))
    assert abs(means[-1]) < 0.2 * abs(means[0])


def test_advantages_of_a_teacher() -> None:
    ours, theirs = [-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0]
    assert teacher_advantages(ours, theirs, coefficient=2.0) == [-1.0, 2.0, 0.0]
    assert teacher_advantages(ours, theirs, discount=0.5) == [-0.5 + 0.5 * 1.0, 1.0, 0.0]
    with pytest.raises(DataError, match="3 log-probabilities and 1 of the teacher"):
        teacher_advantages(ours, [0.0])


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    flat = config_of_folder(tmp_path).flat() | COMMON | {"load_hf": str(tmp_path)}
    with pytest.raises(ConfigError, match="there is no teacher; give its folder with --kd-teacher"):
        Trainer(RunConfig.from_flat(flat)).train_on(_texts(0), objectives.generalized_jsd())
    with pytest.raises(ConfigError, match=r"beta=1\.5: a beta from 0 to 1"):
        objectives.generalized_jsd(1.5)
