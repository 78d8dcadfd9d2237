"""The trainer's scores, references, weights and custom losses against transformers and formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.output_losses import chunked_loss
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.post_training import RolloutSampler, Trainer, Trajectory, largest_difference, objectives, policy_loss
from megatron_core.post_training.hugging_face_weights import in_buckets
from megatron_core.verify.ranks import RankFailure, run_ranks, this_world
from tests.post_training.trl_1_16 import policy_inputs as inputs
from tests.runs import TINY
from tests.training.trl_1_16.inputs import load_model, save_inputs

COMMON = {
    "seq_length": 48,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 8,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "fp64": True,
    "kernel_backend": "reference",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
STEPS = 3
CHUNKS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, chunks": CHUNKS,
    "tp2 sp, chunks": {"tensor_model_parallel_size": 2, "sequence_parallel": True, **CHUNKS},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
}


def _config(folder: Path, **settings: Any) -> RunConfig:
    save_inputs(folder)
    return RunConfig.from_flat(config_of_folder(folder).flat() | COMMON | {"load_hf": str(folder)} | settings)


def _tiny(**settings: Any) -> RunConfig:
    own = {"mock_data": False, "seq_length": 32, "position_embedding_type": "rope"}
    return RunConfig.from_flat(TINY | own | settings)


def _answers() -> list[Trajectory]:
    return [Trajectory.of_answer(sample.prompt, sample.answer) for sample in inputs.sampled(0)]


def _ranks(layout: str) -> int:
    return 1 if "one process" in layout else 2


def _scores(config: RunConfig) -> list[np.ndarray]:
    found = Trainer(config, this_world()).log_probs(_answers(), temperature=0.7, with_entropy=True)
    assert found.entropy is not None
    return [torch.cat(rows).numpy() for rows in (found.log_probs, found.entropy)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_equal_those_of_transformers(layout: str, tmp_path: Path) -> None:
    config = _config(tmp_path, **LAYOUTS[layout])
    model = load_model(tmp_path).eval()
    log_probs, entropies = [], []
    for sample in inputs.sampled(0):
        ids = torch.tensor([[*sample.prompt, *sample.answer]])
        with torch.no_grad():
            rows = (model(input_ids=ids).logits[0, inputs.PROMPT_LENGTH - 1 : -1] / 0.7).log_softmax(-1)
        log_probs.append(rows.gather(1, torch.tensor(sample.answer)[:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    for ours in run_ranks(_ranks(layout), _scores, config):
        np.testing.assert_allclose(ours[0], torch.cat(log_probs).numpy(), rtol=1e-10)
        np.testing.assert_allclose(ours[1], torch.cat(entropies).numpy(), rtol=1e-10)


def _steps_with_entropy(config: RunConfig) -> tuple[list[float], int]:
    """Losses, norms and entropies of steps at a temperature with an entropy bonus; and the number of chunks."""
    sizes: list[int] = []
    real = chunked_loss.linear

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return real(x, weight)

    setattr(chunked_loss, "linear", product)  # noqa: B010
    in_parts = partial(chunked_loss.linear_cross_entropy, max_logit_bytes=20_000)
    setattr(policy_loss, "linear_cross_entropy", in_parts)  # noqa: B010
    trainer = Trainer(config, this_world())
    numbers = []
    for _ in range(STEPS):
        texts = [replace(text, values={"advantages": 1.0, "old_log_probs": -4.0}) for text in _answers()]
        result = trainer.train_on(texts, objectives.ppo(entropy_coefficient=0.3), temperature=1.7)
        numbers += [result.loss, result.grad_norm, result.breakdown["entropy"]]
    return numbers, len(sizes)


def _steps_of_transformers(folder: Path) -> list[float]:
    model = load_model(folder).eval()
    optimizer = torch.optim.AdamW(model.parameters(), COMMON["lr"], weight_decay=0.0)
    numbers = []
    for _ in range(STEPS):
        losses, entropies = [], []
        for sample in inputs.sampled(0):
            ids = torch.tensor([[*sample.prompt, *sample.answer]])
            rows = (model(input_ids=ids).logits[0, inputs.PROMPT_LENGTH - 1 : -1] / 1.7).log_softmax(-1)
            ratio = (rows.gather(1, torch.tensor(sample.answer)[:, None])[:, 0] + 4.0).exp()
            entropies.append(-(rows.exp() * rows).sum(-1))
            losses.append(-torch.minimum(ratio, ratio.clamp(0.8, 1.2)))
        entropy = torch.cat(entropies).mean()
        loss = torch.cat(losses).mean() - 0.3 * entropy
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        numbers += [float(loss.detach()), float(norm), float(entropy.detach())]
    return numbers


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", ["one process", "one process, chunks", "tp2 sp, chunks"])
def test_temperature_and_entropy_in_chunks_equal_transformers(layout: str, tmp_path: Path) -> None:
    config = _config(tmp_path, weight_decay=0.0, **LAYOUTS[layout])
    expected = _steps_of_transformers(tmp_path)
    for numbers, chunks in run_ranks(_ranks(layout), _steps_with_entropy, config):
        np.testing.assert_allclose(numbers, expected, rtol=1e-9)
        assert chunks > 20 if "chunks" in layout else chunks == 0


def _reference(config: RunConfig) -> tuple[float, float, float]:
    """The largest change of log-probabilities of the copy and of the model by a step, and their start."""
    trainer = Trainer(config, this_world())
    before = torch.cat(trainer.log_probs(_answers()).log_probs)
    reference = trainer.frozen_copy()
    start = torch.cat(reference.log_probs(_answers()).log_probs)
    trainer.train_on(_answers(), objectives.cross_entropy())
    changes = [
        (torch.cat(scores.log_probs) - before).abs().max().item()
        for scores in (reference.log_probs(_answers()), trainer.log_probs(_answers()))
    ]
    return (start - before).abs().max().item(), *changes


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_copy_keeps_the_weights_of_its_time(layout: str, tmp_path: Path) -> None:
    for start, of_copy, of_model in run_ranks(_ranks(layout), _reference, _config(tmp_path, **LAYOUTS[layout])):
        assert (start, of_copy) == (0.0, 0.0)
        assert of_model > 1e-3


def _without_adapters(config: RunConfig) -> tuple[float, float, float]:
    trainer = Trainer(config, this_world())
    base = torch.cat(trainer.log_probs(_answers()).log_probs)
    for _ in range(2):
        trainer.train_on(_answers(), objectives.cross_entropy())
    apart = torch.cat(trainer.log_probs(_answers(), adapters=False).log_probs)
    adapted = torch.cat(trainer.log_probs(_answers()).log_probs)
    sampler = RolloutSampler(trainer)
    groups = sampler.sample([sample.prompt for sample in inputs.sampled(0)], max_new_tokens=4)
    answers = [group[0] for group in groups]
    pairs = zip(inputs.sampled(0), answers, strict=True)
    trajectories = [Trajectory.of_answer(sample.prompt, answer.tokens) for sample, answer in pairs]
    differs = largest_difference(answers, trainer.log_probs(trajectories).log_probs)
    return (apart - base).abs().max().item(), (adapted - base).abs().max().item(), differs


def test_adapters_are_sampled_with_and_can_be_left_out(tmp_path: Path) -> None:
    config = _config(tmp_path, lora_rank=2)
    ((apart, adapted, differs),) = run_ranks(1, _without_adapters, config)
    assert apart == 0.0
    assert adapted > 1e-4
    assert differs < 1e-12


def _exported(config: RunConfig, steps: int) -> dict[str, np.ndarray]:
    trainer = Trainer(config, this_world())
    for _ in range(steps):
        trainer.train_on(_answers(), objectives.cross_entropy())
    buckets = list(in_buckets(trainer.weights(), 10_000))
    assert all(sum(tensor.nbytes for _, tensor in bucket) <= 10_000 or len(bucket) == 1 for bucket in buckets)
    return {name: tensor.numpy() for bucket in buckets for name, tensor in bucket}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_have_the_names_and_values_of_transformers(layout: str, tmp_path: Path) -> None:
    config = _config(tmp_path, **LAYOUTS[layout])
    theirs = {name: tensor.numpy() for name, tensor in load_model(tmp_path).state_dict().items()}
    for ours in run_ranks(_ranks(layout), _exported, config, 0):
        assert set(ours) == {name for name in theirs if name != "lm_head.weight"}
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor, theirs[name])


def test_exported_weights_compute_the_scores_after_training(tmp_path: Path) -> None:
    """The model of transformers with the weights of two ranks has the log-probabilities of the trainer."""
    config = _config(tmp_path, tensor_model_parallel_size=2, lora_rank=2)
    exported, _ = run_ranks(2, _exported, config, 2)
    model = load_model(tmp_path).eval()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in exported.items()}, strict=False)
    scores, _ = run_ranks(2, _trained_scores, config, 2)
    log_probs = []
    for sample in inputs.sampled(0):
        ids = torch.tensor([[*sample.prompt, *sample.answer]])
        with torch.no_grad():
            rows = model(input_ids=ids).logits[0, inputs.PROMPT_LENGTH - 1 : -1].log_softmax(-1)
        log_probs.append(rows.gather(1, torch.tensor(sample.answer)[:, None])[:, 0])
    np.testing.assert_allclose(scores, torch.cat(log_probs).numpy(), rtol=1e-9)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


def _trained_scores(config: RunConfig, steps: int) -> np.ndarray:
    trainer = Trainer(config, this_world())
    for _ in range(steps):
        trainer.train_on(_answers(), objectives.cross_entropy())
    return torch.cat(trainer.log_probs(_answers()).log_probs).numpy()


def _preferences(log_probs: list[torch.Tensor]) -> torch.Tensor:
    """-log sigmoid of the difference of the sums of pairs of answers."""
    sums = torch.stack([row.sum() for row in log_probs])
    return objectives.bradley_terry_loss(0.1 * sums[0::2], 0.1 * sums[1::2]).mean()


def _custom(config: RunConfig) -> list[tuple[float, float]]:
    trainer = Trainer(config, this_world())
    results = [trainer.train_on_loss(_answers(), _preferences) for _ in range(3)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_loss_trains_as_autograd_does(layout: str, tmp_path: Path) -> None:
    """Three steps against autograd through the model of transformers, and torch's AdamW."""
    config = _config(tmp_path, weight_decay=0.0, **LAYOUTS[layout])
    model = load_model(tmp_path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = _preferences(_log_probs(model))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append((loss.item(), norm.item()))
    for steps in run_ranks(_ranks(layout), _custom, config):
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


def _saved(config: RunConfig, last: int) -> list[float]:
    trainer = Trainer(config, this_world())
    losses = [trainer.train_on(_answers(), objectives.cross_entropy()).loss for _ in range(trainer.iteration, last)]
    trainer.save()
    trainer.close()
    return losses


def test_a_saved_trainer_resumes_in_another_layout(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = _config(tmp_path / "model")
    straight = run_ranks(1, _saved, _with(config, save=str(tmp_path / "a")), 4)[0]
    folder = str(tmp_path / "b")
    begun = run_ranks(1, _saved, _with(config, save=folder, load=folder), 2)[0]
    for later in run_ranks(2, _saved, _with(config, save=folder, load=folder, tensor_model_parallel_size=2), 4):
        assert begun + later == pytest.approx(straight, rel=1e-9)


def _with(config: RunConfig, **settings: Any) -> RunConfig:
    return RunConfig.from_flat(config.flat() | settings)


def _differing(config: RunConfig) -> None:
    world = this_world()
    Trainer(config, world).log_probs([Trajectory.of_answer([1, 2], [3, 4 + world.rank])])


def test_ranks_with_other_trajectories_are_refused() -> None:
    with pytest.raises(RankFailure, match="the trajectories differ between ranks"):
        run_ranks(2, _differing, _tiny())


def test_bad_trajectories_are_refused() -> None:
    trainer = Trainer(_tiny())
    with pytest.raises(DataError, match="advantages of a trajectory has 3 numbers for 2 learned tokens"):
        Trajectory.of_answer([1], [2, 3], advantages=[1.0, 2.0, 3.0])
    with pytest.raises(DataError, match="outside of the vocabulary"):
        trainer.log_probs([Trajectory.of_answer([1], [61])])
    with pytest.raises(DataError, match="predicts 40 tokens, more than seq_length=32"):
        trainer.log_probs([Trajectory.of_answer([1], [2] * 40)])
    with pytest.raises(DataError, match="reads the value 'advantages'"):
        trainer.train_on([Trajectory.of_answer([1], [2])], objectives.reinforce())
    with pytest.raises(DataError, match="trajectory 1 has the values"):
        trainer.train_on(
            [Trajectory.of_answer([1], [2], advantages=1.0), Trajectory.of_answer([1], [2])], objectives.reinforce()
        )
    with pytest.raises(ConfigError, match="mock_data=True is not read by Trainer"):
        Trainer(_tiny(mock_data=True))
    with pytest.raises(ConfigError, match="temperature=0"):
        trainer.log_probs([Trajectory.of_answer([1], [2])], temperature=0)


def _asked(config: RunConfig, prompts: list[list[int]], by_rank: bool) -> None:
    world = this_world()
    sampler = RolloutSampler(Trainer(config, world))
    sampler.sample([[*prompt, world.rank * by_rank] for prompt in prompts], max_new_tokens=2)


@pytest.mark.parametrize(
    ("prompts", "by_rank", "message"),
    [([[1]], True, "the prompts or the seed differ"), ([[1], [70]], False, "tokens outside of the vocabulary")],
)
def test_ranks_refuse_wrong_prompts_together(prompts: list[list[int]], by_rank: bool, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, _asked, _tiny(), prompts, by_rank)


def test_advantages_are_those_of_the_papers() -> None:
    from megatron_core.post_training.advantages import (
        generalized_advantages,
        group_advantages,
        leave_one_out_advantages,
    )

    rewards = [1.0, 0.0, 0.0, 3.0]
    deviation = torch.tensor(rewards, dtype=torch.float64).std().item()
    assert group_advantages(rewards) == pytest.approx([(r - 1.0) / (deviation + 1e-4) for r in rewards])
    assert group_advantages(rewards, divide_by_std=False) == [0.0, -1.0, -1.0, 2.0]
    assert leave_one_out_advantages(rewards) == pytest.approx([1 - 1, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3])
    values = [0.5, 0.25, 1.0]
    deltas = [0.0 + 0.9 * 0.25 - 0.5, 0.0 + 0.9 * 1.0 - 0.25, 1.0 - 1.0]
    expected = [sum((0.9 * 0.8) ** k * deltas[t + k] for k in range(3 - t)) for t in range(3)]
    advantages, returns = generalized_advantages([0.0, 0.0, 1.0], values, discount=0.9, smoothing=0.8)
    assert advantages == pytest.approx(expected)
    assert returns == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)])
    cut, _ = generalized_advantages([0.0, 0.0, 1.0], values, discount=0.9, smoothing=0.8, value_after=0.5)
    assert cut == pytest.approx([a + (0.9 * 0.8) ** (2 - t) * 0.9 * 0.5 for t, a in enumerate(advantages)])


def test_kl_estimates() -> None:
    log_probs, reference = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.0]).double()
    ratios = [math.exp(-0.5), math.exp(1.0)]
    assert objectives.kl_estimate(log_probs, reference, "k1").tolist() == [0.5, -1.0]
    assert objectives.kl_estimate(log_probs, reference, "k2").tolist() == [0.125, 0.5]
    expected = [ratio - 1 - math.log(ratio) for ratio in ratios]
    assert objectives.kl_estimate(log_probs, reference, "k3").tolist() == pytest.approx(expected)


STEP_SETTINGS: list[dict[str, Any]] = [
    {"lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2, "clip_grad": 0.5},
    {"betas": (0.85, 0.9), "clip_grad": 0.0},
    {"lr": 5e-4, "weight_decay": 0.0, "eps": 1e-5},
    {},
]


def _with_settings(config: RunConfig) -> list[list[float]]:
    """Log-probabilities after each step."""
    trainer = Trainer(config, this_world())
    rows = []
    for settings in STEP_SETTINGS:
        trainer.train_on(_answers(), objectives.cross_entropy(), **settings)
        rows.append(torch.cat(trainer.log_probs(_answers()).log_probs).tolist())
    return rows


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_of_a_step_are_those_of_torch(layout: str, tmp_path: Path) -> None:
    """The last step has the configured settings again."""
    config = _config(tmp_path, weight_decay=0.1, **LAYOUTS[layout])
    model = load_model(tmp_path).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    configured = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "clip_grad": 1.0}
    expected = []
    for settings in STEP_SETTINGS:
        current = configured | settings
        for group, decay in zip(optimizer.param_groups, (current["weight_decay"], 0.0), strict=True):
            group.update(lr=current["lr"], betas=current["betas"], eps=current["eps"], weight_decay=decay)
        optimizer.zero_grad()
        torch.cat([-row for row in _log_probs(model)]).mean().backward()
        limit = current["clip_grad"] or math.inf
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        with torch.no_grad():
            expected.append(torch.cat(_log_probs(model)).tolist())
    for rows in run_ranks(_ranks(layout), _with_settings, config):
        for ours, theirs in zip(rows, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


def _log_probs(model: Any) -> list[torch.Tensor]:
    """The log-probabilities of each answer's tokens by a model of transformers."""
    rows = []
    for sample in inputs.sampled(0):
        ids = torch.tensor([[*sample.prompt, *sample.answer]])
        logits = model(input_ids=ids).logits[0, inputs.PROMPT_LENGTH - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(sample.answer)[:, None])[:, 0])
    return rows


def test_settings_of_a_step_are_checked() -> None:
    trajectory = [Trajectory.of_answer([1], [2, 3])]
    with pytest.raises(ConfigError, match=r"adam_beta1=1\.5"):
        Trainer(_tiny()).train_on(trajectory, objectives.cross_entropy(), betas=(1.5, 0.9))
    with pytest.raises(ConfigError, match="are those of Adam, and the run has optimizer=sgd"):
        Trainer(_tiny(optimizer="sgd")).train_on(trajectory, objectives.cross_entropy(), eps=1e-6)
