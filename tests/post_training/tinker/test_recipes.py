"""The requests of tinker-cookbook's recipes against a server that is killed half-way, and against our trainer.

Every recipe is the loop of a published one with the same calls of the client: steps that are sent before their results
are read, groups of samples, scores by a teacher, soft targets, preferences, and conversations of several turns. All
recipes run at the same time on one server. It is killed after two steps; a new one continues from what was saved. Then
one process of ``Trainer`` takes the same steps on the same data, with the formulas written here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_core.config import RunConfig
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.post_training import Trainer, Trajectory, objectives
from megatron_core.verify.ranks import run_ranks, this_world
from tests.post_training.tinker.processes import NAME, SETTINGS, save_model, server_of

tinker = pytest.importorskip("tinker", reason="tinker needs Python 3.11")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2 dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_stage": 1}),
}
RANK, SEED, RATE, STEPS = 2, 5, 0.01, 4
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
PROMPTS = [[40, 41, 42], [50, 51], [60, 61, 62, 63]]
BETA = 0.3
TARGETS = 3


@dataclass
class Run:
    """A training, and the record of its steps: the loss, its data as lists, and the log-probabilities before it."""

    service: Any
    client: Any
    first_step: int
    steps: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    scores: list[list[Any]] = field(default_factory=list)

    def learn(self, data: Sequence[dict[str, Any]], loss_fn: str) -> None:
        """A step whose two requests are sent before a result is read."""
        output = self.client.forward_backward([_datum(entry) for entry in data], loss_fn)
        update = self.client.optim_step(tinker.AdamParams(learning_rate=RATE, **ADAM))
        outputs = output.result(timeout=90).loss_fn_outputs
        assert update.result(timeout=90).metrics["grad_norm"] > 0
        self.record(loss_fn, data, [row["logprobs"].to_numpy() for row in outputs])

    def record(self, loss_fn: str, data: Sequence[dict[str, Any]], scores: list[Any]) -> None:
        """Note a step."""
        self.steps.append((loss_fn, list(data)))
        self.scores.append(scores)

    def sampler(self) -> Any:
        """A client that samples with the present weights."""
        return self.client.save_weights_and_get_sampling_client().result(timeout=90)


def _datum(entry: dict[str, Any]) -> Any:
    inputs = {name: np.asarray(numbers) for name, numbers in entry.items() if name != "tokens"}
    for name, numbers in inputs.items():
        inputs[name] = numbers.astype(np.int64 if name == "target_tokens" else np.float32)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(entry["tokens"]), loss_fn_inputs=inputs)


def _prompt(tokens: Sequence[int]) -> Any:
    return tinker.ModelInput.from_ints(list(tokens))


def _wire(numbers: Sequence[float]) -> list[float]:
    """The numbers as they are sent."""
    return np.float32(numbers).tolist()


def _text(step: int) -> list[int]:
    return np.random.RandomState(step).randint(0, 90, 9).tolist()


def supervised(run: Run, step: int) -> None:
    """As sl_loop: weights of 0 for the prompt."""
    data = []
    for number in range(3):
        text = _text(10 * step + number)
        data.append({"tokens": text[:-1], "target_tokens": text[1:], "weights": [0.0] * 3 + [1.0] * 5})
    run.learn(data, "cross_entropy")


def _answers(sampler: Any, prompts: Sequence[Sequence[int]], step: int) -> list[tuple[Sequence[int], Any]]:
    """Groups of samples, all requested before one is read."""
    params = tinker.SamplingParams(max_tokens=6, stop=[93], seed=step)
    futures = [sampler.sample(_prompt(prompt), 4, params) for prompt in prompts]
    return [
        (prompt, sequence)
        for prompt, future in zip(prompts, futures, strict=True)
        for sequence in future.result(timeout=90).sequences
    ]


def _policy_datum(prompt: Sequence[int], answer: Any, advantages: Sequence[float]) -> dict[str, Any]:
    unused = [0.0] * (len(prompt) - 1)
    tokens = [*prompt, *answer.tokens]
    return {
        "tokens": tokens[:-1],
        "target_tokens": tokens[1:],
        "logprobs": _wire([*unused, *answer.logprobs]),
        "advantages": _wire([*unused, *advantages]),
    }


def reinforcement(run: Run, step: int) -> None:
    """As rl_loop: advantages are rewards minus the mean of the group."""
    answers = _answers(run.sampler(), PROMPTS, step)
    data = []
    for number in range(0, len(answers), 4):
        group = answers[number : number + 4]
        rewards = [sum(token < 50 for token in answer.tokens) for _, answer in group]
        for (prompt, answer), reward in zip(group, rewards, strict=True):
            data.append(_policy_datum(prompt, answer, [reward - np.mean(rewards)] * len(answer.tokens)))
    run.learn(data, "importance_sampling")
    # The weights that sampled are those that are trained.
    for entry, scores in zip(data, run.scores[-1], strict=True):
        first = next(place for place, score in enumerate(entry["logprobs"]) if score)
        np.testing.assert_allclose(scores[first:], entry["logprobs"][first:], atol=1e-5)


def distillation(run: Run, step: int) -> None:
    """As on_policy_distillation: advantages are the differences of log-probabilities from a teacher's."""
    teacher = run.service.create_sampling_client(base_model=NAME).result(timeout=90)
    answers = _answers(run.sampler(), PROMPTS, step)
    futures = [teacher.compute_logprobs(_prompt([*prompt, *answer.tokens])) for prompt, answer in answers]
    data = []
    for (prompt, answer), future in zip(answers, futures, strict=True):
        difference = np.subtract(future.result(timeout=90)[len(prompt) :], answer.logprobs)
        # The student begins at the teacher: without a constant the first step has no gradient.
        data.append(_policy_datum(prompt, answer, (difference + 0.5).tolist()))
    run.learn(data, "ppo")


def soft_targets(run: Run, step: int) -> None:
    """As sdft: the most likely tokens of a teacher that sees a demonstration, with their probabilities as weights."""
    teacher = run.service.create_sampling_client(base_model=NAME).result(timeout=90)
    params = tinker.SamplingParams(max_tokens=1)
    data = []
    for prompt, answer in _answers(run.sampler(), PROMPTS[:2], step):
        demonstration = _text(step)[:4]
        seen = _prompt([*demonstration, *prompt, *answer.tokens])
        response = teacher.sample(seen, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=TARGETS)
        top = response.result(timeout=90).topk_prompt_logprobs[len(demonstration) + len(prompt) :]
        tokens = [*prompt, *answer.tokens]
        targets = np.zeros((len(tokens) - 1, TARGETS), dtype=np.int64)
        weights = np.zeros((len(tokens) - 1, TARGETS))
        for place, entries in enumerate(top):
            chances = np.exp([score for _, score in entries])
            targets[len(prompt) - 1 + place] = [token for token, _ in entries]
            weights[len(prompt) - 1 + place] = chances / chances.sum()
        data.append({"tokens": tokens[:-1], "target_tokens": targets.tolist(), "weights": _wire(weights)})
    run.learn(data, "cross_entropy")


def _dpo(scores: Sequence[Tensor], data: Sequence[dict[str, Any]]) -> Tensor:
    """The loss of pairs of a chosen and a rejected text."""
    rewards = [
        (row * row.new_tensor(entry["weights"])).sum() - entry["reference"]
        for row, entry in zip(scores, data, strict=True)
    ]
    return -sum(
        logsigmoid(BETA * (chosen - rejected)) for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)
    )


def preferences(run: Run, step: int) -> None:
    """As dpo: scores by the weights before training, and a loss of the client."""
    reference = run.service.create_sampling_client(base_model=NAME).result(timeout=90)
    data = []
    for number in range(4):
        text = _text(10 * step + number)
        entry = {"tokens": text[:-1], "target_tokens": text[1:], "weights": [0.0] * 3 + [1.0] * 5}
        scores = reference.compute_logprobs(_prompt(text)).result(timeout=90)
        data.append({**entry, "reference": float(np.dot(scores[1:], entry["weights"]))})
    outputs: list[list[Any]] = []

    def loss(_: Any, log_probs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        outputs.append([row.detach().numpy().copy() for row in log_probs])
        value = _dpo(log_probs, data)
        return value, {"dpo_loss": value.item()}

    datums = [_datum({name: entry[name] for name in entry if name != "reference"}) for entry in data]
    output = run.client.forward_backward_custom(datums, loss).result(timeout=90)
    run.client.optim_step(tinker.AdamParams(learning_rate=RATE, **ADAM)).result(timeout=90)
    assert output.metrics["dpo_loss"] > 0
    run.record("dpo", data, outputs[0])


def conversations(run: Run, step: int) -> None:
    """As guess_number: two turns, of which the environment's part is not trained; two conversations in threads."""
    sampler = run.sampler()
    params = tinker.SamplingParams(max_tokens=5, stop="!", seed=step)

    def play(number: int) -> dict[str, Any]:
        tokens = list(PROMPTS[number])
        log_probs = [0.0] * (len(tokens) - 1)
        advantages = [0.0] * (len(tokens) - 1)
        for turn in range(2):
            (answer,) = sampler.sample(_prompt(tokens), 1, params).result(timeout=90).sequences
            observed = [70 + turn, 71]
            log_probs += [*answer.logprobs, 0.0, 0.0]
            advantages += [*([1.0 - 2.0 * number] * len(answer.tokens)), 0.0, 0.0]
            tokens += [*answer.tokens, *observed]
        return {
            "tokens": tokens[:-1],
            "target_tokens": tokens[1:],
            "logprobs": _wire(log_probs),
            "advantages": _wire(advantages),
        }

    with ThreadPoolExecutor(2) as threads:
        run.learn(list(threads.map(play, range(2))), "cispo")


RECIPES: dict[str, Callable[[Run, int], None]] = {
    recipe.__name__: recipe
    for recipe in (supervised, reinforcement, distillation, soft_targets, preferences, conversations)
}


def _half(url: str, paths: dict[str, str], first_step: int) -> dict[str, Run]:
    """Two steps of all recipes at the same time, each a client of its own; their weights are saved at the end."""

    def half(name: str) -> Run:
        service = tinker.ServiceClient(base_url=url, api_key="tml-none")
        if name in paths:
            client = service.create_training_client_from_state_with_optimizer(paths[name])
        else:
            client = service.create_lora_training_client(NAME, rank=RANK, seed=SEED)
        run = Run(service, client.result(timeout=90), first_step)
        for step in range(first_step, first_step + 2):
            RECIPES[name](run, step)
        paths[name] = run.client.save_state(f"step-{first_step + 2}").result(timeout=90).path
        return run

    with ThreadPoolExecutor(len(RECIPES)) as threads:
        return dict(zip(RECIPES, threads.map(half, RECIPES), strict=True))


# make test runs all recipes in four ranks; test_layouts.py compares one process.
@pytest.fixture(scope="module", params=[pytest.param("one process", marks=pytest.mark.whole_matrix), "tp2 dp2"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The folder of the model, and the steps of each recipe with their log-probabilities."""
    folder = tmp_path_factory.mktemp("recipes")
    save_model(folder / "model")
    ranks, layout = LAYOUTS[request.param]
    flags = {"lora_rank": 4, "save": folder / "weights", **layout}
    paths: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        processes: list[int] = []
        with server_of(folder / "model", ranks=ranks, processes=processes, **flags) as url:
            halves = [_half(url, paths, 0)]
            os.killpg(processes[0], signal.SIGKILL)
        with server_of(folder / "model", ranks=ranks, **flags) as url:
            halves.append(_half(url, paths, 2))
    recorded = {
        name: (
            [step for half in halves for step in half[name].steps],
            [scores for half in halves for scores in half[name].scores],
        )
        for name in RECIPES
    }
    yield folder / "model", recorded


def _columns(data: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Texts with one target of each token."""
    columns = []
    for entry in data:
        if np.ndim(entry["target_tokens"]) == 1:
            columns.append(entry)
            continue
        for targets, weights in zip(np.transpose(entry["target_tokens"]), np.transpose(entry["weights"]), strict=True):
            columns.append({**entry, "target_tokens": targets.tolist(), "weights": weights.tolist()})
    return columns


@dataclass(frozen=True)
class _Targets(Trajectory):
    targets: Sequence[int] = ()

    @property
    def labels(self) -> Sequence[int]:
        return self.targets


def _trajectory(entry: dict[str, Any]) -> Trajectory:
    names = {"weights": "weights", "logprobs": "old_log_probs", "advantages": "advantages"}
    values = {ours: entry[theirs] for theirs, ours in names.items() if theirs in entry}
    targets = entry["target_tokens"]
    return _Targets([*entry["tokens"], targets[-1]], [1] * len(targets), values, targets=targets)


def _weighted(log_probs: Tensor, batch: Any) -> Tensor:
    return -batch["weights"] * log_probs


def _cispo(log_probs: Tensor, batch: Any) -> Tensor:
    ratio = (log_probs - batch["old_log_probs"]).exp().clamp(0.8, 1.2)
    return -ratio.detach() * batch["advantages"] * log_probs


LOSSES: dict[str, Any] = {
    "cross_entropy": _weighted,
    "importance_sampling": objectives.importance_sampling_loss,
    "ppo": partial(objectives.clipped_loss, clip=0.2, clip_high=0.2),
    "cispo": _cispo,
}


def by_trainer(folder: Path, steps: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[list[Any]]:
    """Log-probabilities before each step of a trainer in one process."""
    adam = {"adam_beta1": ADAM["beta1"], "adam_beta2": ADAM["beta2"], "adam_eps": ADAM["eps"], "weight_decay": 0.0}
    settings = {"lora_rank": RANK, "seed": SEED, "train_iters": STEPS, "lr": RATE, "clip_grad": 0.0, **adam}
    settings |= {"lr_decay_style": "constant", "load_hf": str(folder), "global_batch_size": 2, **SETTINGS}
    trainer = Trainer(RunConfig.from_flat(config_of_folder(folder).flat() | settings), this_world())
    scores = []
    for loss_fn, data in steps:
        trajectories = [_trajectory(entry) for entry in _columns(data)]
        scores.append([row.numpy() for row in trainer.log_probs(trajectories).log_probs])
        if loss_fn == "dpo":
            trainer.train_on_loss(trajectories, partial(_dpo, data=data), lr=RATE)
        else:
            loss = objectives.TokenObjective(loss=LOSSES[loss_fn], mean_over="sum")
            trainer.train_on(trajectories, loss, lr=RATE)
    return scores


@pytest.mark.every_case
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_equals_a_trainer(recipe: str, runs: Any) -> None:
    folder, recorded = runs
    steps, scores = recorded[recipe]
    assert len(steps) == STEPS
    (expected,) = run_ranks(1, by_trainer, folder, steps)
    for step, (ours, theirs) in enumerate(zip(scores, expected, strict=True)):
        rows = [column for row in ours for column in (row.T if row.ndim > 1 else [row])]
        for row, their in zip(rows, theirs, strict=True):
            np.testing.assert_allclose(row, their, atol=2e-6, err_msg=f"{recipe}, step {step}")
