"""Results of the server in every kind of layout against transformers with torch's AdamW, and against our trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.post_training import Trainer, Trajectory, objectives
from megatron_core.verify.ranks import run_ranks, this_world
from tests.post_training.tinker.processes import LAYOUTS, NAME, SETTINGS, save_model, server_of
from tests.training.trl_1_16.inputs import load_model

tinker = pytest.importorskip("tinker", reason="tinker needs Python 3.11")

ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 1.5}
RATES = [0.01, 0.02]
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
SEED, RANK = 11, 2


def texts(step: int) -> list[list[int]]:
    """Texts of different lengths."""
    draw = np.random.RandomState(step)
    return [draw.randint(0, 90, length).tolist() for length in (9, 5, 14)]


def extras(step: int, number: int, length: int) -> dict[str, list[float]]:
    """Numbers of each predicted token."""
    draw = np.random.RandomState(100 * step + number)
    draws = draw.normal(size=(3, length)).astype(np.float32).tolist()
    return {"weights": draws[0], "logprobs": [value - 5.0 for value in draws[1]], "advantages": draws[2]}


def datum(text: list[int], **inputs: list[float]) -> Any:
    """Tokens whose targets are the next ones."""
    model_input = tinker.ModelInput.from_ints(text[:-1])
    return tinker.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": text[1:], **inputs})


def data_of(step: int) -> tuple[list[Any], list[Any]]:
    """The data of two calls: of a cross entropy, and of PPO."""
    supervised, policy = [], []
    for number, text in enumerate(texts(step)):
        numbers = extras(step, number, len(text) - 1)
        supervised.append(datum(text, weights=numbers["weights"]))
        policy.append(datum(text, logprobs=numbers["logprobs"], advantages=numbers["advantages"]))
    return supervised, policy


def by_client(client: Any, steps: range) -> list[dict[str, Any]]:
    """Losses, gradient norm, and log-probabilities before each step."""
    results = []
    for step in steps:
        supervised, policy = data_of(step)
        first = client.forward_backward(supervised, "cross_entropy")
        second = client.forward_backward(policy, "ppo", CLIP)
        update = client.optim_step(tinker.AdamParams(learning_rate=RATES[step], **ADAM))
        outputs = [first.result(timeout=90), second.result(timeout=90)]
        results.append(
            {
                "losses": [output.metrics["loss:sum"] for output in outputs],
                "norm": update.result(timeout=90).metrics["grad_norm"],
                "scores": [entry["logprobs"].tolist() for entry in outputs[1].loss_fn_outputs],
            }
        )
    return results


def by_transformers(folder: Path) -> list[dict[str, Any]]:
    """The same with transformers, torch's AdamW, and the formulas of Tinker's documentation."""
    model = load_model(folder).eval()
    betas = (ADAM["beta1"], ADAM["beta2"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=betas, eps=ADAM["eps"], weight_decay=ADAM["weight_decay"]
    )
    results = []
    for step, rate in enumerate(RATES):
        losses = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
        scores = []
        for number, text in enumerate(texts(step)):
            rows = model(input_ids=torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
            log_probs = rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
            numbers = {name: torch.tensor(x).double() for name, x in extras(step, number, len(text) - 1).items()}
            ratio = (log_probs - numbers["logprobs"]).exp()
            clipped = ratio.clamp(CLIP["clip_low_threshold"], CLIP["clip_high_threshold"])
            losses[0] = losses[0] - (numbers["weights"] * log_probs).sum()
            losses[1] = losses[1] - torch.minimum(ratio * numbers["advantages"], clipped * numbers["advantages"]).sum()
            scores.append(log_probs.tolist())
        optimizer.zero_grad()
        (losses[0] + losses[1]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["grad_clip_norm"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        results.append({"losses": [loss.item() for loss in losses], "norm": float(norm), "scores": scores})
    return results


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Equal up to the float32 of log-probabilities on the wire."""
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our["losses"], their["losses"], rtol=1e-9)
        np.testing.assert_allclose(our["norm"], their["norm"], rtol=1e-8)
        for our_row, their_row in zip(our["scores"], their["scores"], strict=True):
            np.testing.assert_allclose(our_row, their_row, rtol=3e-7)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_fine_tuning_equals_transformers(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    save_model(tmp_path)
    ranks = 1 if layout == "one process" else 2
    with (
        server_of(tmp_path, ranks=ranks, **LAYOUTS[layout]) as url,
        tinker.ServiceClient(base_url=url, api_key="tml-none") as service,
    ):
        client = service.create_lora_training_client(NAME, rank=0).result(timeout=60)
        ours = by_client(client, range(2))
        # A second training starts at the base model.
        again = service.create_lora_training_client(NAME, rank=0).result(timeout=60)
        assert by_client(again, range(1)) == ours[:1]
    assert_same(ours, by_transformers(tmp_path))


def by_trainer(folder: Path) -> list[list[float]]:
    """Log-probabilities of a text after each step of a trainer whose adapters have the training's rank and seed."""
    own = {"lora_rank": RANK, "seed": SEED, "train_iters": 2, "lr_decay_style": "constant", "clip_grad": 0.0}
    adam = {"lr": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-12, "weight_decay": 0.0}
    settings = {"load_hf": str(folder), "global_batch_size": 2, **SETTINGS, **own, **adam}
    trainer = Trainer(RunConfig.from_flat(config_of_folder(folder).flat() | settings), this_world())
    text = Trajectory(texts(0)[0], [1] * 8)
    rows = []
    for rate in RATES:
        supervised = objectives.TokenObjective(loss=objectives.cross_entropy_loss, mean_over="sum")
        trainer.train_on([text], supervised, lr=rate)
        rows.append(trainer.log_probs([text]).log_probs[0].tolist())
    return rows


def adapt(client: Any, rate: float) -> list[float]:
    """A step on the same text; its log-probabilities afterwards."""
    data = [datum(texts(0)[0])]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=rate))
    return client.forward(data, "cross_entropy").result(timeout=90).loss_fn_outputs[0]["logprobs"].tolist()


def test_adapters_equal_a_trainer_and_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of rank 2 in a server of rank 4; the second step is taken by a new server in another layout."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = tmp_path / "model"
    save_model(model)
    (expected,) = run_ranks(1, by_trainer, model)
    flags = {"lora_rank": 4, "save": tmp_path / "weights"}
    with server_of(model, **flags) as url, tinker.ServiceClient(base_url=url, api_key="tml-none") as service:
        client = service.create_lora_training_client(NAME, rank=RANK, seed=SEED).result(timeout=60)
        other = service.create_lora_training_client(NAME, rank=4, seed=3).result(timeout=60)
        adapt(other, 0.5)
        np.testing.assert_allclose(adapt(client, RATES[0]), expected[0], rtol=1e-6)
        path = client.save_state("first").result(timeout=60).path
        with pytest.raises(tinker.RequestFailedError, match="'first' exists already"):
            client.save_state("first").result(timeout=60)
        assert client.save_state("first", overwrite=True).result(timeout=60).path == path
        to_sample = client.save_weights_for_sampler("first").result(timeout=60).path
    with (
        server_of(model, ranks=2, **flags, **LAYOUTS["tp2 sp"]) as url,
        tinker.ServiceClient(base_url=url, api_key="tml-none") as service,
    ):
        continued = service.create_training_client_from_state_with_optimizer(path).result(timeout=60)
        assert continued.get_info().lora_rank == RANK
        text = tinker.ModelInput.from_ints(texts(0)[0])
        sampler = service.create_sampling_client(model_path=to_sample).result(timeout=60)
        np.testing.assert_allclose(sampler.compute_logprobs(text).result(timeout=60)[1:], expected[0], rtol=1e-6)
        np.testing.assert_allclose(adapt(continued, RATES[1]), expected[1], rtol=1e-6)
        # Without the optimizer the same step has other moments.
        without_moments = service.create_training_client_from_state(path).result(timeout=60)
        assert np.abs(np.subtract(adapt(without_moments, RATES[1]), expected[1])).max() > 1e-4
        with pytest.raises(tinker.RequestFailedError, match="no optimizer state"):
            service.create_training_client_from_state_with_optimizer(to_sample).result(timeout=60)
