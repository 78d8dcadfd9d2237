"""The engine of verl: its signatures, its registration, and its steps against transformers with torch's AdamW."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_core.errors import ConfigError, DataError
from megatron_core.post_training import Trajectory
from megatron_core.post_training.verl_engine import STRATEGY, VerlEngine, register_verl_engine
from megatron_core.post_training.verl_settings import run_config
from megatron_core.verify.ranks import run_ranks, this_world
from tests.training.trl_1_16.inputs import load_model, save_inputs

REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "initialize": {},
    "train_mode": {},
    "eval_mode": {},
    "optimizer_zero_grad": {},
    "optimizer_step": {},
    "lr_scheduler_step": {},
    "forward_backward_batch": {"data": REQUIRED, "loss_function": REQUIRED, "forward_only": False},
    "get_per_tensor_param": {},
    "get_data_parallel_size": {},
    "get_data_parallel_rank": {},
    "get_data_parallel_group": {},
    "to": {"device": REQUIRED, "model": True, "optimizer": True, "grad": True},
    "save_checkpoint": {"local_path": REQUIRED, "hdfs_path": None, "global_step": 0, "max_ckpt_to_keep": None},
    "load_checkpoint": {"local_path": REQUIRED, "hdfs_path": None, "del_local_after_load": True},
    "is_mp_src_rank_with_outputs": {},
    "disable_adapter": {},
}
"""Methods of ``BaseEngine`` in verl 0.9.1 with their arguments and defaults. Those that it implements itself, of
``train_batch`` and ``infer_batch``, and the exports of shards, which need an engine's own format, are left out."""
PROPERTIES = ("is_param_offload_enabled", "is_optimizer_offload_enabled")
TAKES_MORE = ("train_mode", "eval_mode", "save_checkpoint", "load_checkpoint")
"""Methods that receive any further named arguments."""
FLAGS = {"fp64": True, "kernel_backend": "reference", "bf16": False, "adam_eps": 1e-8}
STEPS, RATE, CLIP = 3, 0.01, 1.0
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "tp2 dp2": (4, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_method_has_the_arguments_of_verl(name: str) -> None:
    parameters = dict(inspect.signature(getattr(VerlEngine, name)).parameters)
    del parameters["self"]
    more = [parameter for parameter in parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    assert bool(more) == (name in TAKES_MORE or name == "get_per_tensor_param")
    named = {key: value.default for key, value in parameters.items() if value.kind is not value.VAR_KEYWORD}
    assert named == SIGNATURES[name]


def test_the_engine_is_registered_under_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[tuple[str, str, str], type] = {}

    class BaseEngine:
        def train_batch(self, data: Any, loss_function: Any) -> str:
            return "of verl"

    class EngineRegistry:
        @classmethod
        def register(cls, model_type: str, backend: list[str], device: list[str]) -> Callable[[type], type]:
            def add(engine: type) -> type:
                registered.update({(model_type, name, kind): engine for name in backend for kind in device})
                return engine

            return add

    for path in ("verl", "verl.workers", "verl.workers.engine", "verl.workers.engine.base"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    base: Any = sys.modules["verl.workers.engine.base"]
    base.BaseEngine, base.EngineRegistry = BaseEngine, EngineRegistry
    engine: Any = register_verl_engine()
    kinds = [(model, STRATEGY, device) for model in ("language_model", "value_model") for device in ("cuda", "cpu")]
    assert registered == dict.fromkeys(kinds, engine)
    assert issubclass(engine, BaseEngine) and engine.train_batch(None, None, None) == "of verl"
    assert engine.optimizer_step is VerlEngine.optimizer_step
    for name in PROPERTIES:
        assert isinstance(getattr(VerlEngine, name), property)


class Batch(dict[str, Any]):
    """The parts of a TensorDict that the engine and losses read."""

    def set_non_tensor(self, name: str, value: Any) -> None:
        self[name] = value


def texts_of(step: int) -> list[list[int]]:
    draw = np.random.RandomState(step)
    return [draw.randint(0, 90, length).tolist() for length in (9, 6, 14, 8)]


def numbers_of(step: int, text: int, length: int) -> np.ndarray:
    """Sampling log-probabilities and advantages of a text's tokens."""
    return np.random.RandomState(100 * step + text).normal(size=(2, length)) - np.array([[5.0], [0.0]])


def batch_of(step: int, rank: int, size: int) -> Batch:
    """The part of a data-parallel rank, as verl sends it: without padding; the first 4 tokens of a text are its
    prompt."""
    numbers = range(4 * rank // size, 4 * (rank + 1) // size)
    texts = texts_of(step)
    rows: dict[str, list[Tensor]] = {"input_ids": [], "loss_mask": [], "old_log_probs": [], "advantages": []}
    for number in numbers:
        length = len(texts[number])
        rows["input_ids"].append(torch.tensor(texts[number]))
        rows["loss_mask"].append(torch.tensor([0.0] * 4 + [1.0] * (length - 4)))
        for name, values in zip(("old_log_probs", "advantages"), numbers_of(step, number, length), strict=True):
            rows[name].append(torch.tensor(values))
    nested = {name: torch.nested.as_nested_tensor(tensors, layout=torch.jagged) for name, tensors in rows.items()}
    return Batch({**nested, "temperature": 1.3, "calculate_entropy": True})


def policy_loss(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """A clipped loss with an entropy bonus, divided and scaled as verl's losses are."""
    log_probs = model_output["log_probs"].values()
    # Of the token after each one, as verl's losses roll their masks.
    mask = torch.roll(data["loss_mask"].values(), -1, 0)
    ratio = ((log_probs - data["old_log_probs"].values()) * mask).exp()
    advantages = data["advantages"].values()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    losses = losses - 0.1 * model_output["entropy"].values()
    loss = (losses * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {"ratio": float(ratio.detach().mean())}


def engine_of(folder: Path, layout: dict[str, int], model_type: str = "language_model") -> VerlEngine:
    """An engine as verl makes it, on ranks that are joined already."""
    world = this_world()
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank))
    engine = VerlEngine(
        model_config=SimpleNamespace(path=str(folder), model_type=model_type),
        engine_config=SimpleNamespace(max_token_len_per_gpu=48, override_transformer_config=FLAGS, **layout),
        optimizer_config=SimpleNamespace(
            lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, clip_grad=CLIP, lr_warmup_steps=2, total_training_steps=-1
        ),
        checkpoint_config=None,
    )
    engine.initialize()
    return engine


def take_steps(engine: VerlEngine, steps: range) -> list[tuple[float, float, float]]:
    """Loss, norm of the gradient and learning rate of each step, in the order of verl's ``train_batch``."""
    results = []
    for step in steps:
        rate = engine.lr_scheduler_step()
        data = batch_of(step, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.train_mode(disable_auto_offload=False):
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, policy_loss)
            norm = engine.optimizer_step()
        assert set(output["model_output"]) == {"log_probs", "entropy"} and output["metrics"]["ratio"]
        loss = torch.tensor(output["loss"][0], dtype=torch.float64)
        if engine.get_data_parallel_group() is not None:
            torch.distributed.all_reduce(loss, group=engine.get_data_parallel_group())
            loss /= engine.get_data_parallel_size()
        results.append((float(loss), norm, rate))
    return results


def by_engine(folder: Path, layout: dict[str, int], saved: Path) -> Any:
    """Steps, a checkpoint, a step, the checkpoint again, and the same step; the weights at the end."""
    engine = engine_of(folder, layout)
    with pytest.raises(DataError, match="optimizer_step without gradients"):
        engine.optimizer_step()
    results = take_steps(engine, range(STEPS - 1))
    engine.save_checkpoint(str(saved / "a"), global_step=2, max_ckpt_to_keep=1)
    engine.save_checkpoint(str(saved / "b"), global_step=2, max_ckpt_to_keep=1)
    with pytest.raises(DataError, match="no weights are stored at"):
        engine.load_checkpoint(str(saved / "a"))
    third = take_steps(engine, range(STEPS - 1, STEPS))
    engine.load_checkpoint(str(saved / "b"))
    assert take_steps(engine, range(STEPS - 1, STEPS)) == third
    # A batch whose gradients are dropped does not change the weights; one without a loss has log-probabilities.
    data = batch_of(0, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    with engine.train_mode():
        engine.forward_backward_batch(data, policy_loss)
    with engine.eval_mode():
        inferred = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]["log_probs"]
    assert not inferred.requires_grad and [len(row) for row in inferred.unbind()] == [
        len(row) for row in data["input_ids"].unbind()
    ]
    named, peft = engine.get_per_tensor_param()
    weights = {name: tensor.double().numpy() for name, tensor in named}
    assert peft is None
    return results + third, weights, engine.is_mp_src_rank_with_outputs()


def by_transformers(folder: Path) -> tuple[list[tuple[float, float, float]], dict[str, np.ndarray]]:
    """The same steps on one process."""
    model = load_model(folder).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    results = []
    for step in range(STEPS):
        total: Any = 0.0
        tokens = 0
        for number, text in enumerate(texts_of(step)):
            rows = (model(input_ids=torch.tensor([text[:-1]])).logits[0] / 1.3).log_softmax(-1)[3:]
            log_probs = rows.gather(1, torch.tensor(text[4:])[:, None])[:, 0]
            old, advantages = (torch.tensor(row[3:-1]) for row in numbers_of(step, number, len(text)))
            ratio = (log_probs - old).exp()
            total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
            total = total + 0.1 * (rows.exp() * rows).sum()
            tokens += len(log_probs)
        optimizer.zero_grad()
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        rate = RATE * min((step + 1) / 2, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        results.append((float(total.detach()) / tokens, float(norm), rate))
    return results, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_transformers(layout: str, tmp_path: Path) -> None:
    ranks, settings = LAYOUTS[layout]
    save_inputs(tmp_path / "model")
    results = run_ranks(ranks, by_engine, tmp_path / "model", settings, tmp_path)
    expected, weights = by_transformers(tmp_path / "model")
    sources = 0
    for ours, tensors, is_source in results:
        np.testing.assert_allclose(ours, expected, rtol=1e-9)
        sources += is_source
        for name, tensor in tensors.items():
            np.testing.assert_allclose(tensor, weights[name], atol=1e-9, err_msg=name)
    parallel = int(np.prod(list(settings.values()) or [1]))
    assert sources == ranks // parallel


def value_loss(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """Squared errors of values, with the advantages as returns."""
    mask = torch.roll(data["loss_mask"].values(), -1, 0)
    errors = model_output["values"].values() - data["advantages"].values()
    return (errors.square() * mask).sum() / data["batch_num_tokens"] * data["dp_size"], {}


def by_critic(folder: Path, layout: dict[str, int]) -> list[tuple[float, ...]]:
    """Norms of the gradients, and the values of the last batch."""
    engine = engine_of(folder, layout, "value_model")
    norms = []
    for step in range(2):
        engine.lr_scheduler_step()
        data = batch_of(step, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.train_mode():
            output = engine.forward_backward_batch(data, value_loss)
            norms.append(engine.optimizer_step())
    assert set(output["model_output"]) == {"values"}
    whole = engine.forward_backward_batch(batch_of(0, 0, 1), None, forward_only=True) if layout == {} else None
    return [tuple(norms), () if whole is None else tuple(whole["model_output"]["values"].values().tolist())]


def by_value_trainer(folder: Path) -> list[tuple[float, ...]]:
    """The same by ``train_on_loss``."""
    trainer = engine_of(folder, {}, "value_model").trainer
    norms = []
    for step in range(2):
        texts = texts_of(step)
        returns = [torch.tensor(numbers_of(step, number, len(text))[1, 3:-1]) for number, text in enumerate(texts)]
        trajectories = [Trajectory(text, [0] * 3 + [1] * (len(text) - 4)) for text in texts]

        def loss(values: list[Tensor], returns: list[Tensor] = returns) -> Tensor:
            return (torch.cat(values) - torch.cat(returns)).square().mean()

        norms.append(trainer.train_on_loss(trajectories, loss, lr=RATE * min((step + 1) / 2, 1.0)).grad_norm)
    values = trainer.values([Trajectory(text, [1] * (len(text) - 1)) for text in texts_of(0)])
    return [tuple(norms), tuple(number for row in values for number in (*row.tolist(), 0.0))]


def test_a_critic_equals_the_trainer(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    (expected,) = run_ranks(1, by_value_trainer, tmp_path)
    (alone,) = run_ranks(1, by_critic, tmp_path, {})
    np.testing.assert_allclose(alone[0], expected[0], rtol=1e-9)
    np.testing.assert_allclose(alone[1], expected[1], rtol=1e-9)
    for norms, _ in run_ranks(2, by_critic, tmp_path, {"tensor_model_parallel_size": 1}):
        np.testing.assert_allclose(norms, expected[0], rtol=1e-9)


def test_offloading_goes_with_the_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the moves, on a rank that takes its device for a GPU's."""
    save_inputs(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    engine = VerlEngine(
        SimpleNamespace(path=str(tmp_path)),
        SimpleNamespace(max_token_len_per_gpu=48, param_offload=True, optimizer_offload=True),
        SimpleNamespace(),
        None,
    )
    moves: list[str] = []
    engine._world = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    engine._trainer = SimpleNamespace(  # type: ignore[assignment]
        offload=lambda: moves.append("off"), onload=lambda: moves.append("on"), weights=lambda: iter([("w", None)])
    )
    engine.to("cpu")
    engine.to("cpu")
    with engine.train_mode():
        moves.append("train")
    with engine.eval_mode(disable_auto_offload=True):
        moves.append("eval")
    assert [name for name, _ in engine.get_per_tensor_param()[0]] == ["w"]
    engine.to("cuda", model=False, optimizer=False)
    assert moves == ["off", "on", "train", "off", "eval", "on", "off"]
    assert engine.is_param_offload_enabled and engine.is_optimizer_offload_enabled


def test_settings_of_verl_become_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_inputs(tmp_path)
    model = SimpleNamespace(path=str(tmp_path), lora_rank=4, lora_alpha=8)
    config = run_config(
        model,
        SimpleNamespace(max_token_len_per_gpu=64, tensor_model_parallel_size=2, dtype="bfloat16", seed=7),
        SimpleNamespace(lr=2e-5, betas=(0.8, 0.99), clip_grad=0.5, total_training_steps=12, lr_warmup_steps=-1),
        4,
    )
    values = config.flat()
    expected = {
        "seq_length": 64,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "bf16": True,
        "seed": 7,
        "lora_rank": 4,
        "lora_alpha": 8,
        "lr": 2e-5,
        "adam_beta1": 0.8,
        "clip_grad": 0.5,
        "train_iters": 12,
        "global_batch_size": 2,
    }
    assert {name: values[name] for name in expected} == expected
    with pytest.raises(ConfigError, match="max_token_len_per_gpu=None: give the length"):
        run_config(model, SimpleNamespace(), SimpleNamespace(), 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="weights and optimizer state together"):
        VerlEngine(model, SimpleNamespace(max_token_len_per_gpu=64, param_offload=True), SimpleNamespace(), None)
