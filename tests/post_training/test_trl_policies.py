"""Policy objectives train as trl's losses do: four steps in float64, in one process and in every kind of layout.

The steps of trl are stored (trl_1_16/make_files.py), so that the tests do not need it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_core.config import RunConfig
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.post_training import Trainer, Trajectory, objectives
from megatron_core.post_training.objectives import TokenObjective, with_sampler_correction
from megatron_core.verify.ranks import run_ranks, this_world
from tests.post_training.trl_1_16 import policy_inputs as inputs
from tests.training.trl_1_16.inputs import save_inputs

THEIRS = json.loads((Path(inputs.__file__).parent / "steps.json").read_text())
DAPO = objectives.dapo()
OBJECTIVES: dict[str, TokenObjective] = {
    "grpo": objectives.grpo(kl_coefficient=0.05),
    "grpo, two-sided clip": objectives.grpo(dual_clip=1.3),
    "mean over tokens, entropy": objectives.ppo(entropy_coefficient=0.03),
    "dr_grpo": objectives.dr_grpo(inputs.LONGEST_ANSWER),
    "dapo": DAPO,
    "gspo": objectives.gspo(0.01, 0.02),
    "cispo": objectives.cispo(clip_high=0.2),  # trl's epsilon_high is the limit itself
    "sapo": objectives.sapo(),
    "dapo, other sampler": replace(
        objectives.ppo(),
        loss=with_sampler_correction(objectives.ppo().loss, inputs.CORRECTION_CAP),
        metrics=("clip fraction", "truncated fraction"),
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, rows of one": {"micro_batch_size": 1},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
}
CASES = [(kind, layout) for layout in LAYOUTS for kind in OBJECTIVES]


def _config(folder: Path, **layout: Any) -> RunConfig:
    save_inputs(folder)
    common = {
        "load_hf": str(folder),
        "seq_length": 48,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": inputs.STEPS,
        "lr": inputs.LEARNING_RATE,
        "lr_decay_style": "constant",
        "weight_decay": inputs.WEIGHT_DECAY,
        "adam_beta2": 0.99,
        "fp64": True,
        "kernel_backend": "reference",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return RunConfig.from_flat(config_of_folder(folder).flat() | common | layout)


def _trajectory(answer: inputs.Sampled) -> Trajectory:
    learned = [at for at, counts in enumerate(answer.mask) if counts]
    return Trajectory(
        [*answer.prompt, *answer.answer],
        [0] * (inputs.PROMPT_LENGTH - 1) + answer.mask,
        {
            "advantages": answer.advantage,
            "old_log_probs": [answer.old_log_probs[at] for at in learned],
            "reference_log_probs": [answer.reference_log_probs[at] for at in learned],
            "sampler_log_probs": [answer.sampler_log_probs[at] for at in learned],
        },
    )


def _steps(config: RunConfig, kind: str, pack: bool) -> list[tuple[float, float]]:
    trainer = Trainer(config, this_world(), pack=pack)
    results = []
    for step in range(inputs.STEPS):
        trajectories = [_trajectory(answer) for answer in inputs.sampled(step)]
        result = trainer.train_on(trajectories, OBJECTIVES[kind])
        results.append((result.loss, result.grad_norm))
    return results


@pytest.mark.drawn(12)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_steps_equal_those_of_trl(kind: str, layout: str, tmp_path: Path) -> None:
    ranks = 1 if "one process" in layout else 2
    config = _config(tmp_path, **LAYOUTS[layout])
    for steps in run_ranks(ranks, _steps, config, kind, "rows of one" not in layout):
        for ours, theirs in zip(steps, THEIRS[kind], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-12)
