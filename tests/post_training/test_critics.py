"""Value models and reward models train as formulas and trl's losses do: four steps in float64, in all layouts.

The values and the losses of a critic are those of transformers' model and of PPO's equation; the steps of trl are
stored (trl_1_16/make_files.py), so that the tests do not need it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError, ConfigError, DataError
from megatron_core.hub.adapter_export import export_adapter
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.post_training import RolloutSampler, Trainer, Trajectory, objectives
from megatron_core.verify.ranks import run_ranks, this_world
from tests.post_training.trl_1_16 import critic_inputs
from tests.post_training.trl_1_16 import policy_inputs as inputs
from tests.training.trl_1_16.inputs import load_model, save_inputs

OF_TRL = json.loads((Path(inputs.__file__).parent / "reward_steps.json").read_text())
CLIP = 0.2
COMMON: dict[str, Any] = {
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
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, rows of one": {"micro_batch_size": 1},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero1": {"zero_stage": 1},
    "dp2 zero2": {"zero_stage": 2},
    "dp2 zero3": {"zero_stage": 3},
    "experts, ep2": {"expert_model_parallel_size": 2},
    "experts, tp2 sp ep2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
IN_FLOAT32 = 1e-6
"""Limit for transformers' models with experts, whose norms and routers are in float32 also in a model in float64."""
Steps = list[tuple[float, float]]


def _folder(root: Path, layout: str) -> Path:
    critic_inputs.save_value_model(root, experts="experts" in layout)
    return root


def _config(folder: Path, layout: str, **settings: Any) -> RunConfig:
    flat = config_of_folder(folder).flat() | COMMON | {"load_hf": str(folder)} | LAYOUTS[layout] | settings
    return RunConfig.from_flat(flat)


def _ranks(layout: str) -> int:
    return 1 if "one process" in layout else 2


def _answers(step: int) -> list[Trajectory]:
    """The answers of a step, with the mask of tools, and the numbers of the critic."""
    trajectories = []
    for answer, critic in zip(inputs.sampled(step), critic_inputs.critics(step), strict=True):
        learned = np.flatnonzero(answer.mask)
        values = {"returns": np.array(critic.returns)[learned], "old_values": np.array(critic.old_values)[learned]}
        mask = [0] * (inputs.PROMPT_LENGTH - 1) + answer.mask
        trajectories.append(Trajectory([*answer.prompt, *answer.answer], mask, values))
    return trajectories


def _values_of_transformers(model: Any, step: int) -> list[torch.Tensor]:
    """The values of the states before the learned tokens of each answer."""
    rows = []
    for answer in inputs.sampled(step):
        ids = torch.tensor([[*answer.prompt, *answer.answer]])
        hidden = model.base_model(input_ids=ids).last_hidden_state
        values = model.score(hidden)[0, inputs.PROMPT_LENGTH - 1 : -1, 0]
        rows.append(values[torch.tensor(answer.mask) > 0])
    return rows


def _value_loss(model: Any, step: int, clip: float | None) -> torch.Tensor:
    """Equation 9 of arXiv 1707.06347 with limits, a mean over tokens."""
    values = torch.cat(_values_of_transformers(model, step))
    masks = [np.array(answer.mask) > 0 for answer in inputs.sampled(step)]
    critics = list(zip(critic_inputs.critics(step), masks, strict=True))
    returns = torch.cat([torch.tensor(critic.returns, dtype=torch.float64)[mask] for critic, mask in critics])
    old = torch.cat([torch.tensor(critic.old_values, dtype=torch.float64)[mask] for critic, mask in critics])
    losses = (values - returns) ** 2
    if clip is not None:
        losses = torch.max(losses, (values.clamp(old - clip, old + clip) - returns) ** 2)
    return 0.5 * losses.mean()


def _steps_of_transformers(folder: Path, clip: float | None) -> Steps:
    model = critic_inputs.load_value_model(folder).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": inputs.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=inputs.LEARNING_RATE, betas=(0.9, 0.99))
    steps = []
    for step in range(inputs.STEPS):
        optimizer.zero_grad()
        loss = _value_loss(model, step, clip)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


def _values(config: RunConfig) -> np.ndarray:
    trainer = Trainer(config, this_world())
    values = torch.cat(trainer.values(_answers(0)))
    assert torch.equal(torch.cat(trainer.frozen_copy().values(_answers(0))), values)
    return values.numpy()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_equal_those_of_transformers(layout: str, tmp_path: Path) -> None:
    config = _config(_folder(tmp_path, layout), layout)
    with torch.no_grad():
        expected = torch.cat(_values_of_transformers(critic_inputs.load_value_model(tmp_path).eval(), 0)).numpy()
    if "experts" in layout:
        of_transformers = expected
        expected = run_ranks(1, _values, _config(tmp_path, "one process"))[0]
        np.testing.assert_allclose(expected, of_transformers, atol=IN_FLOAT32)
    for values in run_ranks(_ranks(layout), _values, config):
        np.testing.assert_allclose(values, expected, rtol=1e-9)


def _critic_steps(config: RunConfig, clip: float | None, pack: bool) -> Steps:
    trainer = Trainer(config, this_world(), pack=pack)
    results = [trainer.train_on(_answers(step), objectives.value(clip)) for step in range(inputs.STEPS)]
    return [(result.loss, result.grad_norm) for result in results]


CASES = [(layout, clip) for layout in LAYOUTS for clip in (CLIP, None)]


@pytest.mark.drawn(7)
@pytest.mark.parametrize(("layout", "clip"), CASES)
def test_a_critic_trains_as_the_equation(layout: str, clip: float | None, tmp_path: Path) -> None:
    config = _config(_folder(tmp_path, layout), layout)
    expected = _steps_of_transformers(tmp_path, clip)
    if "experts" in layout:
        of_transformers = expected
        expected = run_ranks(1, _critic_steps, _config(tmp_path, "one process"), clip, True)[0]
        np.testing.assert_allclose(expected, of_transformers, rtol=IN_FLOAT32)
    for steps in run_ranks(_ranks(layout), _critic_steps, config, clip, "rows of one" not in layout):
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


def _bits(config: RunConfig) -> tuple[Steps, list[float]]:
    trainer = Trainer(config, this_world())
    results = [trainer.train_on(_answers(step), objectives.value(CLIP)) for step in range(2)]
    return [(result.loss, result.grad_norm) for result in results], torch.cat(trainer.values(_answers(0))).tolist()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "pp2", "cp2", "dp2 zero3"])
def test_a_critic_has_the_same_bits_in_every_layout(layout: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, "one process")
    settings: dict[str, Any] = {"fp64": False, "bf16": True, "layout_invariant": True, "micro_batch_size": 1}
    expected = run_ranks(1, _bits, _config(folder, "one process", **settings))
    assert run_ranks(2, _bits, _config(folder, layout, **settings)) == expected * 2


def _reward_steps(config: RunConfig, kind: str, pack: bool) -> Steps:
    trainer = Trainer(config, this_world(), pack=pack)
    settings = critic_inputs.REWARDS[kind]
    results = []
    for step in range(inputs.STEPS):
        texts, margins = critic_inputs.pairs(step)
        loss = objectives.bradley_terry(
            margins if settings.get("margins") else None,
            center_rewards_coefficient=settings.get("center_rewards_coefficient", 0.0),
        )
        result = trainer.train_on_loss([Trajectory.of_text(text) for text in texts], loss)
        results.append((result.loss, result.grad_norm))
    return results


PAIR_CASES = [(kind, layout) for layout in LAYOUTS if "experts" not in layout for kind in critic_inputs.REWARDS]


@pytest.mark.drawn(7)
@pytest.mark.parametrize(("kind", "layout"), PAIR_CASES)
def test_reward_models_train_as_those_of_trl(kind: str, layout: str, tmp_path: Path) -> None:
    config = _config(_folder(tmp_path, layout), layout)
    for steps in run_ranks(_ranks(layout), _reward_steps, config, kind, "rows of one" not in layout):
        for ours, theirs in zip(steps, OF_TRL[kind], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


def _together(actor_config: RunConfig, critic_config: RunConfig) -> tuple[Steps, Steps]:
    """Steps of an actor and a critic in turn."""
    world = this_world()
    actor = Trainer(actor_config, world)
    critic = Trainer(critic_config, world)
    of_actor, of_critic = [], []
    for step in range(inputs.STEPS):
        of_actor.append(actor.train_on(_answers(step), objectives.cross_entropy()))
        of_critic.append(critic.train_on(_answers(step), objectives.value(CLIP)))
    steps = [[(result.loss, result.grad_norm) for result in results] for results in (of_actor, of_critic)]
    return steps[0], steps[1]


def _actor_alone(config: RunConfig) -> Steps:
    trainer = Trainer(config, this_world())
    results = [trainer.train_on(_answers(step), objectives.cross_entropy()) for step in range(inputs.STEPS)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("of_actor", "of_critic"), [("tp2 sp", "pp2"), ("dp2 zero3", "cp2"), ("pp2", "dp2 zero3")])
def test_actor_and_critic_have_layouts_of_their_own(of_actor: str, of_critic: str, tmp_path: Path) -> None:
    for name in ("actor", "critic"):
        (tmp_path / name).mkdir()
    save_inputs(tmp_path / "actor")
    critic_inputs.save_value_model(tmp_path / "critic")
    flat = config_of_folder(tmp_path / "actor").flat() | COMMON | {"load_hf": str(tmp_path / "actor")}
    critic = _config(tmp_path / "critic", of_critic)
    (alone,) = run_ranks(1, _actor_alone, RunConfig.from_flat(flat))
    expected = _steps_of_transformers(tmp_path / "critic", CLIP)
    for steps in run_ranks(2, _together, RunConfig.from_flat(flat | LAYOUTS[of_actor]), critic):
        for ours, theirs in zip(steps, (alone, expected), strict=True):
            for pair, other in zip(ours, theirs, strict=True):
                assert pair == pytest.approx(other, rel=1e-8)


# Weights of the head: names, checkpoints of other models, adapters.


def _exported(config: RunConfig, steps: int) -> dict[str, np.ndarray]:
    trainer = Trainer(config, this_world())
    for _ in range(steps):
        trainer.train_on(_answers(0), objectives.value(None))
    return {name: tensor.numpy() for name, tensor in trainer.weights()}


@pytest.mark.parametrize("layout", ["one process", "tp2 sp", "pp2", "dp2 zero3", "experts, ep2"])
def test_weights_have_the_names_and_values_of_transformers(layout: str, tmp_path: Path) -> None:
    config = _config(_folder(tmp_path, layout), layout)
    theirs = load_file(tmp_path / "model.safetensors")
    for ours in run_ranks(_ranks(layout), _exported, config, 0):
        assert set(ours) == set(theirs)
        assert "score.weight" in ours
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor, theirs[name])


def test_a_head_with_adapters_is_trained_and_resumed(tmp_path: Path) -> None:
    """The critic of a causal model whose other weights are frozen; its checkpoints have adapters and head."""
    (tmp_path / "model").mkdir()
    save_inputs(tmp_path / "model")
    flat = config_of_folder(tmp_path / "model").flat() | COMMON
    settings = {"load_hf": str(tmp_path / "model"), "value_head": True, "lora_rank": 2}
    config = RunConfig.from_flat(flat | settings | {"save": str(tmp_path / "a"), "load": str(tmp_path / "a")})
    begun = run_ranks(1, _saved, config, 2)[0]
    resumed = RunConfig.from_flat(config.flat() | {"tensor_model_parallel_size": 2, "sequence_parallel": True})
    straight = RunConfig.from_flat(flat | settings | {"save": str(tmp_path / "b")})
    (expected, changed) = run_ranks(1, _saved, straight, 4)[0]
    assert changed == {"output_layer.score"}
    for later, _ in run_ranks(2, _saved, resumed, 4):
        assert begun[0] + later == pytest.approx(expected, rel=1e-9)


def _saved(config: RunConfig, last: int) -> tuple[list[float], set[str]]:
    """The losses, and the trained parameters outside of adapters."""
    trainer = Trainer(config, this_world())
    losses = [trainer.train_on(_answers(step), objectives.value(CLIP)).loss for step in range(trainer.iteration, last)]
    trainer.save()
    trainer.close()
    named = [pair for stage in trainer.run.stages.values() for pair in stage.named_global_parameters()]
    return losses, {name for name, p in named if p.requires_grad and ".adapter." not in name}


def test_a_model_is_converted_both_ways_and_verified(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    critic_inputs.save_value_model(tmp_path / "model", dtype=torch.float32)
    assert import_hugging_face(tmp_path / "model", tmp_path / "native") < 1e-5
    assert export_hugging_face(tmp_path / "native", tmp_path / "again") < 1e-5
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("model", "again")]
    for name, tensor in files[0].items():
        np.testing.assert_array_equal(files[1][name], tensor)


def test_a_head_with_merged_adapters_is_that_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_inputs(tmp_path / "model")
    flat = config_of_folder(tmp_path / "model").flat() | COMMON | {"fp64": False}
    settings = {"load_hf": str(tmp_path / "model"), "value_head": True, "lora_rank": 2, "save": str(tmp_path / "run")}
    run_ranks(1, _saved, RunConfig.from_flat(flat | settings), 2)
    with pytest.raises(CheckpointError, match="value_head=True, which --to peft does not write"):
        export_adapter(tmp_path / "run", tmp_path / "adapter")
    export_hugging_face(tmp_path / "run", tmp_path / "merged")
    resumed = RunConfig.from_flat(flat | settings | {"load": settings["save"]})
    ((values, head),) = run_ranks(1, _scores_of_causal, resumed)
    model = critic_inputs.load_value_model(tmp_path / "merged").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(model.score.weight.numpy(), head)
        np.testing.assert_allclose(values, torch.cat(_values_of_transformers(model, 0)).numpy(), rtol=1e-4, atol=1e-6)


def _scores_of_causal(config: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    """Values, and the head that was drawn."""
    trainer = Trainer(config, this_world())
    weights = dict(trainer.weights())
    return torch.cat(trainer.values(_answers(0))).numpy(), weights["score.weight"].numpy()


@pytest.mark.parametrize("stored", ["hugging face", "native"])
def test_a_critic_starts_with_the_weights_of_a_causal_model(stored: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_inputs(tmp_path / "model")
    flat = config_of_folder(tmp_path / "model").flat() | COMMON
    source: dict[str, Any] = {"load_hf": str(tmp_path / "model")}
    if stored == "native":
        folder = str(tmp_path / "native")
        run_ranks(1, _save_policy, RunConfig.from_flat(flat | source | {"save": folder}))
        source = {"load": folder, "finetune": True}
    config = RunConfig.from_flat(flat | source | {"value_head": True})
    ((values, head),) = run_ranks(1, _scores_of_causal, config)
    (other, _) = run_ranks(2, _scores_of_causal, RunConfig.from_flat(config.flat() | LAYOUTS["tp2 sp"]))
    np.testing.assert_allclose(other[0], values, rtol=1e-9)
    assert 0.01 < head.std() < 0.04
    model = load_model(tmp_path / "model").eval()
    model.score = torch.nn.Linear(16, 1, bias=False).double()
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(head))
        expected = torch.cat(_values_of_transformers(model, 0)).numpy()
    np.testing.assert_allclose(values, expected, rtol=1e-9)


def _save_policy(config: RunConfig) -> None:
    trainer = Trainer(config, this_world())
    trainer.save()
    trainer.close()


def test_what_a_value_model_cannot_do_is_refused(tmp_path: Path) -> None:
    config = _config(_folder(tmp_path, "one process"), "one process")
    trainer = Trainer(config)
    with pytest.raises(ConfigError, match=r"the model has values, not log_probs; .*remove --value-head"):
        trainer.log_probs(_answers(0))
    with pytest.raises(ConfigError, match="use the methods and objectives of values"):
        trainer.train_on(_answers(0), objectives.cross_entropy())
    with pytest.raises(ConfigError, match=r"temperature=0\.5"):
        trainer.train_on(_answers(0), objectives.value(), temperature=0.5)
    with pytest.raises(ConfigError, match="has no logits of tokens"):
        RolloutSampler(trainer).sample([[1, 2]], max_new_tokens=2)
    with pytest.raises(DataError, match="are not pairs"):
        trainer.train_on_loss(_answers(0), objectives.bradley_terry())
    with pytest.raises(ConfigError, match=r"output_z_loss_coeff=0\.1 cannot be used with value_head=True"):
        Trainer(_config(tmp_path, "one process", output_z_loss_coeff=0.1))
    settings = json.loads((tmp_path / "config.json").read_text()) | {"id2label": {"0": "no", "1": "yes"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="num_labels=2; GPT2ForSequenceClassification is supported with one"):
        config_of_folder(tmp_path)
