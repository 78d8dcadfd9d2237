"""The trainer of slime: its signatures, and its steps against slime's formulas with transformers and torch's AdamW."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.post_training import Trajectory
from megatron_core.post_training.slime_settings import NOT_READ, config_of_arguments
from megatron_core.post_training.slime_trainer import (
    SENDER,
    RolloutText,
    SlimeTrainer,
    objective_of,
    set_advantages,
    slime_trainer,
)
from megatron_core.verify.ranks import run_ranks, this_world
from tests.training.trl_1_16.inputs import load_model, save_inputs

REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "init": {"args": REQUIRED, "role": REQUIRED, "with_ref": False, "with_opd_teacher": False},
    "sleep": {"tags": None},
    "wake_up": {"tags": None},
    "train": {"rollout_id": REQUIRED, "rollout_data_ref": REQUIRED, "external_data": None},
    "save_model": {"rollout_id": REQUIRED, "force_sync": False},
    "update_weights": {},
    "_get_parallel_config": {},
}
"""The methods of ``TrainRayActor`` at slime's commit 624b824 (August 2026) that an actor implements. Its ``sleep`` and
``wake_up`` require ``tags``, but its groups of actors call them without."""
FLAGS = {"fp64": True, "kernel_backend": "reference", "bf16": False}
RATE, TEMPERATURE = 0.01, 1.3
LENGTHS = (9, 6, 14, 8, 12, 7, 10, 11)
PROMPTS = (4, 2, 5, 3, 4, 2, 3, 6)
ROLLOUTS = (0, 0, 1, 2, 3, 3, 4, 5)
"""The first two texts are parts of one rollout; three rollouts are a step."""
REWARDS = (1.0, -0.5, 0.3, -1.2, 0.7, 0.7, -0.1, 1.5)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "tp2 dp2": (4, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}
DEFAULTS: dict[str, Any] = {
    **dict(NOT_READ),
    **dict.fromkeys(("load", "save", "save_hf", "ref_load", "opd_teacher_load", "eps_clip_c", "lr_decay_iters")),
    **dict.fromkeys(("use_tis", "use_kl_loss", "use_unbiased_kl", "use_opd", "use_rollout_logprobs"), False),
    **dict.fromkeys(("debug_rollout_only", "debug_train_only", "offload_train", "colocate", "finetune"), False),
    **dict.fromkeys(("calculate_per_token_loss", "normalize_advantages", "use_fault_tolerance"), False),
    **{"compute_advantages_and_returns": True, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 48},
    **{"num_rollout": 100, "rollout_batch_size": 6, "n_samples_per_prompt": 1, "global_batch_size": 3},
    **{"rollout_temperature": TEMPERATURE, "loss_type": "policy_loss", "advantage_estimator": "grpo"},
    **{"eps_clip": 0.2, "eps_clip_high": 0.3, "value_clip": 0.2, "entropy_coef": 0.0, "gamma": 0.9, "lambd": 0.8},
    **{"kl_coef": 0.0, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "opd_kl_coef": 0.5, "tis_clip": 1.5},
    **{"tis_clip_low": 0.5, "update_weight_transport": "nccl", "update_weight_buffer_size": 1000},
    **{"lr": RATE, "lr_decay_style": "constant", "weight_decay": 0.0, "clip_grad": 1.0, "adam_eps": 1e-8},
    **{"adam_beta1": 0.9, "adam_beta2": 0.95},
}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "use_tis": True,
             "entropy_coef": 0.05},
    "gspo": {"advantage_estimator": "gspo", "calculate_per_token_loss": True},
    "cispo": {"advantage_estimator": "cispo", "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2",
              "use_unbiased_kl": True},
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.1, "eps_clip_c": 1.5},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "normalize_advantages": True,
                    "kl_loss_type": "k3"},
    "baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.2, "use_opd": True,
                 "normalize_advantages": True},
    "samplers": {"use_rollout_logprobs": True, "calculate_per_token_loss": True},
    "supervised": {"loss_type": "sft_loss", "compute_advantages_and_returns": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_method_has_the_arguments_of_slime(name: str) -> None:
    parameters = dict(inspect.signature(getattr(SlimeTrainer, name)).parameters)
    del parameters["self"]
    assert {key: value.default for key, value in parameters.items()} == SIGNATURES[name]


class TrainRayActor:
    """The parts of slime's class that an actor inherits."""

    def __init__(self, world_size: int, rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> None:
        self.joined = True

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        self.rollout_manager = rollout_manager


def install(logged: list[dict[str, float]]) -> dict[str, Any]:
    """Modules of slime and Ray in this process, and the messages that their sender has received."""
    for path in ("slime", "slime.ray", "slime.observability", "slime.ray.train_actor", "ray",
                 "slime.observability.logging_utils", SENDER):  # fmt: skip
        sys.modules[path] = ModuleType(path)
    modules: Any = sys.modules
    sent: dict[str, Any] = {"weights": {}, "sizes": []}
    modules["slime.ray.train_actor"].TrainRayActor = TrainRayActor
    modules["ray"].get = lambda reference: reference
    logging = modules["slime.observability.logging_utils"]
    logging.init_tracking = lambda args, primary, role: None
    logging.log = lambda args, metrics, step_key: logged.append({**metrics, "key": step_key})

    def send(group: str, handle: Any, version: int, engines: Sequence[Any], bucket: list[tuple[str, Tensor]]) -> None:
        assert (group, handle, engines) == ("slime-pp_0", "group", ["an engine"]) and isinstance(bucket, list)
        sent["weights"].update((name, tensor.double().numpy()) for name, tensor in bucket)
        sent["sizes"].append(version)

    modules[SENDER].connect_rollout_engines_from_distributed = lambda args, group, engines, engine_gpu_counts: "group"
    modules[SENDER].update_weights_from_distributed = send
    return sent


def remote(value: Any) -> Any:
    """A method of a Ray actor."""
    return SimpleNamespace(remote=lambda: value)


class Engine(str):
    """An engine, which has a name."""

    pause_generation = flush_cache = continue_generation = remote(None)


def tokens_of(rollout: int, text: int) -> list[int]:
    return np.random.RandomState(10 * rollout + text).randint(0, 90, LENGTHS[text]).tolist()


def numbers_of(rollout: int, text: int, name: str) -> Tensor:
    """Numbers of a text's response: ``rollout_log_probs``, ``teacher_log_probs`` or ``values``."""
    seed = 1000 * rollout + 10 * text + len(name)
    drawn = np.random.RandomState(seed).normal(size=LENGTHS[text] - PROMPTS[text])
    return torch.tensor(drawn if name == "values" else 0.3 * drawn - 4.5)


def mask_of(text: int) -> Tensor:
    """The learned tokens of a response; in some texts a tool has written the third one."""
    mask = torch.ones(LENGTHS[text] - PROMPTS[text], dtype=torch.float64)
    if text % 3 == 0:
        mask[2] = 0.0
    return mask


def parts_of(rollout: int, size: int) -> list[Any]:
    """References to the texts of each of ``size`` data-parallel ranks, as slime's ``RolloutManager`` makes them."""
    parts = []
    for rank in range(size):
        texts = [text for step in range(2) for text in range(4 * step, 4 * step + 4) if text % size == rank]
        of_rollout = [sum(float(mask_of(other).sum()) for other in range(8) if ROLLOUTS[other] == ROLLOUTS[text])
                      for text in texts]  # fmt: skip
        part = {
            "tokens": [torch.tensor(tokens_of(rollout, text)) for text in texts],
            "loss_masks": [mask_of(text).int() for text in texts],
            "rewards": [REWARDS[text] for text in texts],
            "rollout_mask_sums": torch.tensor(of_rollout),
            "micro_batch_indices": [[number] for number in range(len(texts))],
            "num_microbatches": [4 // size, 4 // size],
            "global_batch_sizes": [3, 3],
            "texts": texts,
        }
        for name in ("rollout_log_probs", "teacher_log_probs"):
            part[name] = [numbers_of(rollout, text, name) for text in texts]
        parts.append(SimpleNamespace(inner=part))
    return parts


def arguments(folder: Path, settings: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, "hf_checkpoint": str(folder / "model"), **settings})


def actor_of(args: SimpleNamespace, role: str = "actor", with_ref: bool = False) -> Any:
    world = this_world()
    actor: Any = slime_trainer(**FLAGS)(world.size, world.rank)
    actor.first = actor.init(args, role, with_ref=with_ref)
    assert actor.joined
    return actor


def by_actor(folder: Path, settings: dict[str, Any], case: dict[str, Any]) -> Any:
    """Two rollouts of two steps: what was logged, and the weights at the end."""
    logged: list[dict[str, float]] = []
    sent = install(logged)
    args = arguments(folder, {**settings, **case, "ref_load": str(folder / "reference")})
    actor = actor_of(args, with_ref=bool(args.kl_coef or args.use_kl_loss))
    engines = [Engine("an engine")]
    manager = {
        "get_updatable_engines_and_lock": (engines, None, 1, [1], None, None),
        "clear_updatable_num_new_engines": None,
    }
    actor.set_rollout_manager(SimpleNamespace(**{name: remote(value) for name, value in manager.items()}))
    size = actor.train_parallel_config["dp_size"]
    rank = actor._trainer.run.groups.index("dp")
    for rollout in range(2):
        parts = parts_of(rollout, size)
        values = {"values": [numbers_of(rollout, text, "values") for text in parts[rank].inner["texts"]]}
        assert actor.train(rollout, parts, external_data=values) is None
    actor.update_weights()
    assert this_world().rank != 0 or (len(sent["sizes"]) > 1 and set(sent["sizes"]) == {1})
    return logged, sent["weights"]


def scores(model: Any, rollout: int, text: int, temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a response."""
    tokens = torch.tensor(tokens_of(rollout, text))
    rows = (model(input_ids=tokens[None, :-1]).logits[0] / temperature).log_softmax(-1)[PROMPTS[text] - 1 :]
    return rows.gather(1, tokens[PROMPTS[text] :, None])[:, 0], -(rows.exp() * rows).sum(-1)


def divergence(log_probs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """slime's ``compute_approx_kl``."""
    log_ratio = log_probs - reference
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": k3, "low_var_kl": k3.clamp(-10, 10)}[kind]


def discounted(rewards: Tensor, factor: float) -> Tensor:
    """For each token the sum of later rewards, with powers of ``factor``."""
    length = len(rewards)
    powers = torch.tensor([[factor ** (later - token) if later >= token else 0.0 for later in range(length)]
                           for token in range(length)], dtype=torch.float64)  # fmt: skip
    return powers @ rewards


def advantages_of(args: SimpleNamespace, rollout: int, old: list[Tensor], reference: list[Tensor]) -> list[Tensor]:
    """Advantages of the 8 texts of a rollout, by the equations of slime's ``compute_advantages_and_returns``."""
    rows = []
    for text in range(8):
        kl = args.kl_coef * divergence(old[text], reference[text], args.kl_loss_type)
        mask = mask_of(text)
        if args.advantage_estimator == "ppo":
            values = numbers_of(rollout, text, "values")
            deltas = torch.cat([args.gamma * values[1:], torch.zeros(1)]) - values - kl
            deltas[-1] += REWARDS[text]
            rows.append(discounted(deltas, args.gamma * args.lambd))
        elif args.advantage_estimator == "reinforce_plus_plus":
            rewards = -kl * mask
            rewards[int(mask.nonzero()[-1])] += REWARDS[text]
            rows.append(discounted(rewards, args.gamma))
        elif args.advantage_estimator == "reinforce_plus_plus_baseline":
            rows.append(REWARDS[text] - kl)
        else:
            rows.append(torch.full_like(kl, REWARDS[text]))
        if args.use_opd:
            rows[-1] = rows[-1] - args.opd_kl_coef * (old[text] - numbers_of(rollout, text, "teacher_log_probs"))
    if args.normalize_advantages:
        mask = torch.cat([mask_of(text) for text in range(8)])
        flat = torch.cat(rows)
        mean = (flat * mask).sum() / mask.sum()
        variance = ((flat - mean) ** 2 * mask).sum() / (mask.sum() - 1)
        rows = [(row - mean) / (variance + 1e-8).sqrt() for row in rows]
    return rows


def loss_of(
    args: SimpleNamespace, rollout: int, text: int, model: Any, old: Tensor, reference: Tensor, advantages: Tensor
) -> Tensor:
    """The losses of a response's tokens, by slime's ``policy_loss_function``."""
    log_probs, entropy = scores(model, rollout, text)
    if args.loss_type == "sft_loss":
        return -log_probs
    mask = mask_of(text)
    sampler = numbers_of(rollout, text, "rollout_log_probs")
    if args.use_rollout_logprobs:
        old = sampler
    ratio = (log_probs - old).exp()
    if args.advantage_estimator == "gspo":
        ratio = (((log_probs - old) * mask).sum() / mask.sum()).exp().expand_as(log_probs)
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    if args.advantage_estimator == "cispo":
        losses = -clipped.detach() * advantages * log_probs
    else:
        losses = torch.maximum(-ratio * advantages, -clipped * advantages)
        if args.eps_clip_c is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -args.eps_clip_c * advantages), losses)
    if args.use_tis:
        losses = losses * (old - sampler).exp().clamp(args.tis_clip_low, args.tis_clip)
    losses = losses - args.entropy_coef * entropy
    if args.use_kl_loss:
        kl = divergence(log_probs, reference, args.kl_loss_type)
        losses = losses + args.kl_loss_coef * (ratio * kl if args.use_unbiased_kl else kl)
    return losses


def mean(args: SimpleNamespace, step: int, losses: Callable[[int], Tensor]) -> Any:
    """slime's mean of a step: over rollouts of means over their tokens, or over tokens."""
    texts = range(4 * step, 4 * step + 4)
    sums = {text: (losses(text) * mask_of(text)).sum() for text in texts}
    counts = {text: float(mask_of(text).sum()) for text in texts}
    if args.calculate_per_token_loss:
        return sum(sums.values()) / sum(counts.values())
    groups = {rollout: [text for text in texts if ROLLOUTS[text] == rollout] for rollout in
              dict.fromkeys(ROLLOUTS[text] for text in texts)}  # fmt: skip
    assert len(groups) == 3
    return sum(sum(sums[text] for text in of_rollout) / sum(counts[text] for text in of_rollout)
               for of_rollout in groups.values()) / 3  # fmt: skip


def by_transformers(folder: Path, case: dict[str, Any]) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    """The same on one process: losses and norms of the gradients, and the weights."""
    args = arguments(folder, case)
    model = load_model(folder / "model").eval()
    frozen = load_model(folder / "reference").eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    results = []
    for rollout in range(2):
        with torch.no_grad():
            old = [scores(model, rollout, text)[0] for text in range(8)]
            reference = [scores(frozen, rollout, text)[0] for text in range(8)]
        advantages = advantages_of(args, rollout, old, reference)
        for step in range(2):

            def losses(
                text: int,
                rollout: int = rollout,
                old: list[Tensor] = old,
                reference: list[Tensor] = reference,
                advantages: list[Tensor] = advantages,
            ) -> Tensor:
                return loss_of(args, rollout, text, model, old[text], reference[text], advantages[text])

            loss = mean(args, step, losses)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            results.append((float(loss.detach()), float(norm)))
    return results, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def save_models(folder: Path) -> None:
    """A policy, and a reference with other weights."""
    save_inputs(folder / "model")
    save_inputs(folder / "reference")
    model = load_model(folder / "reference")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    model.save_pretrained(folder / "reference")


def assert_equal(results: Any, expected: tuple[list[tuple[float, float]], dict[str, np.ndarray]]) -> None:
    """Losses, norms and weights of rank 0; the others log and send nothing."""
    (logged, weights), *others = results
    assert [metrics["train/step"] for metrics in logged] == [0, 1, 2, 3]
    assert all(not lines and not sent for lines, sent in others)
    ours = [(metrics["train/loss"], metrics["train/grad_norm"]) for metrics in logged]
    np.testing.assert_allclose(ours, expected[0], rtol=1e-9)
    for name, tensor in weights.items():
        np.testing.assert_allclose(tensor, expected[1][name], atol=1e-9, err_msg=name)
    assert set(weights) >= set(expected[1]) - {"lm_head.weight"}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["grpo", "ppo"])
def test_steps_equal_transformers_in_every_layout(case: str, layout: str, tmp_path: Path) -> None:
    ranks, settings = LAYOUTS[layout]
    save_models(tmp_path)
    results = run_ranks(ranks, by_actor, tmp_path, settings, CASES[case])
    assert_equal(results, by_transformers(tmp_path, CASES[case]))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", sorted(set(CASES) - {"grpo", "ppo"}))
def test_every_estimator_equals_its_formula(case: str, tmp_path: Path) -> None:
    save_models(tmp_path)
    assert_equal(run_ranks(1, by_actor, tmp_path, {}, CASES[case]), by_transformers(tmp_path, CASES[case]))


def by_critic(folder: Path) -> Any:
    """A rollout of two steps by a critic: this rank's texts with their values, and what was logged."""
    logged: list[dict[str, float]] = []
    install(logged)
    args = arguments(folder, {"advantage_estimator": "ppo", "lr": 0.05})
    actor = actor_of(args, role="critic")
    parts = parts_of(0, actor.train_parallel_config["dp_size"])
    before = actor._trainer.values([Trajectory(tokens_of(0, text), [1] * (LENGTHS[text] - 1)) for text in range(8)])
    results = [actor.train(number, parts)["values"] for number in range(8)]
    texts = parts[actor._trainer.run.groups.index("dp")].inner["texts"]
    return texts, [[row.tolist() for row in rows] for rows in results], [row.tolist() for row in before], logged


def test_a_critic_learns_returns_and_gives_its_values(tmp_path: Path) -> None:
    save_models(tmp_path)
    (alone,) = run_ranks(1, by_critic, tmp_path)
    texts, values, before, logged = alone
    assert texts == list(range(8))
    # Values are those of the response's tokens before the steps, and the loss of the first step is that of slime.
    assert values[0] == [row[PROMPTS[text] - 1 :] for text, row in enumerate(before)]
    args = arguments(tmp_path, {})

    def losses(text: int) -> Tensor:
        old = torch.tensor(values[0][text])
        deltas = args.gamma * torch.cat([old[1:], torch.zeros(1)]) - old
        deltas[-1] += REWARDS[text]
        return discounted(deltas.double(), args.gamma * args.lambd).square()

    assert logged[0]["train/critic-loss"] == pytest.approx(float(mean(args, 0, losses)), rel=1e-6)
    assert logged[-2]["train/critic-loss"] < 0.5 * logged[0]["train/critic-loss"]
    for texts_of_rank, values_of_rank, _, _ in run_ranks(2, by_critic, tmp_path):
        for number, text in enumerate(texts_of_rank):
            np.testing.assert_allclose(values_of_rank[-1][number], values[-1][text], rtol=1e-9)


def by_resumed(folder: Path, resumes: bool) -> Any:
    """The first rollout and a checkpoint, or its continuation; then the second rollout."""
    logged: list[dict[str, float]] = []
    install(logged)
    more = {"save": str(folder / "saved"), "save_hf": str(folder / "of {rollout_id}"),
            "update_weight_transport": "disk", "update_weight_disk_dir": str(folder / "versions")}  # fmt: skip
    actor = actor_of(arguments(folder, {**more, "load": str(folder / "saved") if resumes else None}))
    size = actor.train_parallel_config["dp_size"]
    if not resumes:
        actor.train(0, parts_of(0, size))
        actor.save_model(0, force_sync=True)
        actor.update_weights()
    actor.train(1, parts_of(1, size))
    return actor.first, [metrics["train/loss"] for metrics in logged]


def test_a_resumed_actor_continues_in_another_layout(tmp_path: Path) -> None:
    save_models(tmp_path)
    ((first, losses),) = run_ranks(1, by_resumed, tmp_path, False)
    assert first == 0 and len(losses) == 4
    (resumed, after), _ = run_ranks(2, by_resumed, tmp_path, True)
    assert resumed == 1
    np.testing.assert_allclose(after, losses[2:], rtol=1e-9)
    # Both folders are complete for transformers, with the weights after the first rollout.
    expected = load_model(tmp_path / "of 0").state_dict()
    stored = load_file(tmp_path / "versions" / "weight_v000001" / "model-00001.safetensors")
    assert (tmp_path / "versions" / "weight_v000001" / "tokenizer.json").is_file()
    before = load_model(tmp_path / "model").state_dict()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
        assert not torch.equal(tensor, before[name]), name


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    save_inputs(tmp_path / "model")
    for settings, message in (
        ({"use_opsm": True, "rollout_top_p": 0.9}, "use_opsm=True, rollout_top_p=0.9: this trainer of slime does not"),
        ({"colocate": True}, "give --update-weight-transport disk with --update-weight-disk-dir"),
        ({"use_dynamic_batch_size": False}, "use_dynamic_batch_size=False: give slime_trainer"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of_arguments(arguments(tmp_path, settings), "actor", {}, 1)
    with pytest.raises(ConfigError, match="loss_type=custom_loss"):
        objective_of(arguments(tmp_path, {"loss_type": "custom_loss"}), "actor")
    with pytest.raises(ConfigError, match="advantage_estimator=mine is not one of slime's"):
        set_advantages(
            arguments(tmp_path, {"advantage_estimator": "mine"}), [RolloutText([1, 2], torch.ones(1), 0, 1, (0, 0))]
        )
