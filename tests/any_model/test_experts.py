"""Expert parallelism of transformers' mixtures of experts against torch alone in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core.any_model.experts import find_experts
from megatron_core.errors import MegatronError
from megatron_core.verify.ranks import run_ranks
from tests.any_model.expert_models import NAMES, bytes_of_experts, gradient_error, train
from tests.any_model.models import (
    COMMON,
    Result,
    difference,
    loss_in,
    model_of,
    samples_of,
    throughout_float64,
    train_with_torch,
    weights_of,
)
from tests.sample import WHOLE_MATRIX

EXPERTS = {"expert_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, EXPERTS),
    (4, {"expert_model_parallel_size": 4}),
    (4, {**EXPERTS, "zero_stage": 1}),
    (4, {**EXPERTS, "zero_stage": 2}),
    (4, {**EXPERTS, "zero_stage": 3}),
]
BESIDE: list[tuple[str, dict[str, Any]]] = [
    ("mixtral with its loss", {**EXPERTS, **TENSOR}),
    ("deepseek_v3", {**EXPERTS, "pipeline_model_parallel_size": 2}),
    ("qwen3_moe", {**EXPERTS, "zero_stage": 3, "recompute_granularity": "full"}),
    ("gpt_oss", {**EXPERTS, "zero_stage": 2, "overlap_grad_reduce": True}),
]


@cache
def _reference(name: str) -> Result:
    return train_with_torch(name)


def _assert_equal(results: list[Result], name: str) -> None:
    for result in results:
        assert difference(result, _reference(name)) < 1e-9
        assert gradient_error(result, _reference(name)) < 1e-9


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "row"),
    [(n, r) for i, n in enumerate(NAMES) for r in (range(5) if WHOLE_MATRIX else (0, 1 + i % 4))],
)
def test_equals_torch(name: str, row: int) -> None:
    ranks, settings = ROWS[row]
    _assert_equal(run_ranks(ranks, train, name, settings), name)


@pytest.mark.parametrize(("name", "settings"), BESIDE)
def test_beside_other_parallelism(name: str, settings: dict[str, Any]) -> None:
    _assert_equal(run_ranks(4, train, name, settings), name)


@pytest.mark.parametrize("name", ["two experts for all", "one expert for all"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_without_tokens(name: str, size: int) -> None:
    _assert_equal(run_ranks(size, train, name, {"expert_model_parallel_size": size}), name)


def test_memory_of_experts_falls_with_the_ranks() -> None:
    whole = run_ranks(4, bytes_of_experts, "qwen3_moe", 1)[0]
    for size in (2, 4):
        for part in run_ranks(4, bytes_of_experts, "qwen3_moe", size):
            assert part * size == whole > 0


def test_parallelize_splits_experts() -> None:
    for result in run_ranks(2, _train_parallelized):
        assert difference(result, _reference("olmoe")) < 1e-9


def _train_parallelized() -> Result:
    model = megatron_core.parallelize(model_of("olmoe"), tensor=1, expert=2)
    assert all(m.num_experts == 2 for name, m in model.named_modules() if name.endswith("experts"))
    with pytest.raises(MegatronError, match=r"expert_model_parallel_size=1.*parallelize\(expert=2\)"):
        megatron_core.initialize(model, {**COMMON, "global_batch_size": 8})
    with pytest.raises(MegatronError, match="split already"):
        megatron_core.parallelize(model, tensor=1, expert=2)
    return train("olmoe", EXPERTS, model=model)


def test_gathered_keeps_the_experts_of_other_ranks() -> None:
    for size, values in run_ranks(4, _modify):
        assert size == 2
        assert values == [0.0, 0.0, 1.0, 1.0]


def _modify() -> tuple[int, list[float]]:
    engine = megatron_core.initialize(
        model_of("olmoe"), {**COMMON, **EXPERTS, "global_batch_size": 8, "zero_stage": 3}
    ).engine
    name = "model.layers.0.mlp.experts.down_proj"
    parameter = engine.module.get_parameter(name)
    with engine.gathered(parameter, modify=True):
        parameter.data.fill_(engine.groups.index("ep") if engine.groups.index("edp") == 0 else 7.0)
        size = len(parameter)
    return size, engine.full_state_dict()[name].flatten(1).mean(1).tolist()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_checkpoints_load_on_any_layout(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, EXPERTS),
        (1, {}),
        (4, {**EXPERTS, "zero_stage": 3}),
        (4, {"expert_model_parallel_size": 4}),
    ]
    losses: list[float] = []
    for step, (ranks, settings) in enumerate(layouts):
        results = run_ranks(ranks, _resume, name, folder, step, settings)
        assert len({loss for loss, _ in results}) == 1
        losses.append(results[0][0])
    reference = train_with_torch(name, steps=len(layouts) - 1)
    np.testing.assert_allclose(losses[:3], reference["losses"], rtol=1e-9)
    for label, weight in results[0][1].items():
        np.testing.assert_allclose(weight, reference["weights"][label], rtol=0, atol=1e-9)


def _resume(name: str, folder: str, step: int, settings: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    config = {**COMMON, "global_batch_size": 8, **settings}
    engine, _, loader, _ = megatron_core.initialize(
        model_of(name), config, training_data=samples_of(name), shuffle=False
    )
    if step:
        engine.load_checkpoint(folder)
    weights = weights_of(engine.full_state_dict(), engine.module)
    assert loader is not None
    batches = iter(loader)
    with throughout_float64(engine):
        report = engine.train_batch(batches, lambda output, batch: loss_in(output))
    engine.save_checkpoint(folder)
    engine.finish_saving()
    return report.loss, weights


class Stacked(nn.Module):
    """Four experts in one stack, whose forward is changed by subclasses."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.num_experts = experts
        self.hidden_dim = 8
        self.up = nn.Parameter(torch.randn(experts, 8, 6))
        self.down = nn.Parameter(torch.randn(experts, 6, 8))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum over the choices of each token."""
        inner = torch.einsum("th,tkhf->tkf", hidden_states, self.up[top_k_index]).relu()
        return torch.einsum("tkf,tkfh,tk->th", inner, self.down[top_k_index], top_k_weights)


class Normalised(Stacked):
    """Divides by the weights of all choices, which experts alone do not know."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The mean over the choices."""
        return super().forward(hidden_states, top_k_index, top_k_weights) / top_k_weights.sum(1, keepdim=True)


class Numbered(Stacked):
    """Has a number of experts in its code."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Another expert than the chosen one."""
        return super().forward(hidden_states, (top_k_index + 3) % self.num_experts, top_k_weights)


class Dense(Stacked):
    """Routes inside."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """All experts."""
        return hidden_states


class Buffered(Stacked):
    """Has a scale of each expert in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(4))


class Tied(nn.Module):
    """Two modules of experts with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stacked(), Stacked()
        self.second.up = self.first.up


class Listed(nn.Module):
    """Experts as a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Contained(nn.Module):
    """Experts as a module with linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Sequential(nn.Linear(8, 8))
        self.stack = Stacked()


WRONG = [
    (Contained, 2, "0.experts.0.weight.*would stay whole on every rank"),
    (lambda: Stacked(6), 4, r"Stacked.*its 6 experts.*expert_model_parallel_size=4.*divisor of 6"),
    (lambda: nn.Linear(8, 8), 2, "expert_model_parallel_size=2: Sequential has no module of experts.*set .*=1"),
    (Listed, 2, "0.experts.*ModuleList.*separate modules.*expert_model_parallel_size=1"),
    (Dense, 2, r"Dense.*its forward takes \(hidden_states\)"),
    (Buffered, 2, "Buffered.*has buffers"),
    (Tied, 2, "0.first.*shares a parameter"),
    (Normalised, 2, "Normalised.*is not the sum of the outputs of its experts"),
    (Numbered, 2, "Numbered.*is not the sum of the outputs of its experts"),
]


@pytest.mark.parametrize(("make", "size", "message"), WRONG)
def test_refuses_what_cannot_be_split(make: Any, size: int, message: str) -> None:
    assert run_ranks(size, _refuses, make, size, message) == [True] * size


def _refuses(make: Any, size: int, message: str) -> bool:
    model = nn.Sequential(make())
    with pytest.raises(MegatronError, match=message):
        megatron_core.initialize(model, {"global_batch_size": 8, "expert_model_parallel_size": size})
    return True


def test_arguments_of_another_form_are_refused() -> None:
    run_ranks(2, _call_with_other_arguments)


def _call_with_other_arguments() -> None:
    engine = megatron_core.initialize(model_of("olmoe"), {**COMMON, **EXPERTS, "global_batch_size": 8}).engine
    experts = engine.module.get_submodule("model.layers.0.mlp.experts")
    with pytest.raises(MegatronError, match=r"layers\.0\.mlp\.experts is called with top_k_index torch.int64 \[2, 2\]"):
        experts(torch.zeros(2, 16), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 4))


def test_structure_decides_which_modules_are_experts() -> None:
    """A stack without a telling name is found, and shared experts and convolutions are not."""
    model = nn.Sequential(Stacked(), nn.Conv1d(4, 4, 3), model_of("deepseek_v3"))
    assert list(find_experts(model, 2)) == ["0", "2.model.layers.1.mlp.experts"]


def test_layout_names_the_experts() -> None:
    assert run_ranks(2, _layout) == ["ep2 dp2", "ep2 dp2"]


def _layout() -> str:
    return megatron_core.initialize(model_of("olmoe"), {**COMMON, **EXPERTS, "global_batch_size": 8}).engine.layout


def test_size_must_divide_the_ranks() -> None:
    with pytest.raises(MegatronError, match=r"world_size=3 is not a multiple of 2 \(expert_model_parallel_size=2\)"):
        run_ranks(3, train, "olmoe", EXPERTS)
