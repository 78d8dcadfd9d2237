"""SOAP: the paper's algorithm, the updates of pytorch_optimizer's SOAP, and its state in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.checkpoint import CheckpointReader
from megatron_core.config import OptimizerConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.matrix_optimizers import soap
from megatron_core.optimizer.rule import Rates
from megatron_core.parallel.sharding import Fused
from megatron_core.reports.state_hashes import StateHashes
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

PEER: dict[str, list[float]] = json.loads(Path(__file__).with_name("soap_reference.json").read_text())["weights"]
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.95, "soap_shampoo_beta": 0.8}


def numbers(shape: tuple[int, int], phase: int) -> Tensor:
    """Numbers without a pattern, computed only from integers."""
    k = torch.arange(shape[0] * shape[1])
    return (((k * k * 37 + k * 101 + phase * 17) % 251).double() / 251.0 - 0.5).view(shape)


def algorithm(**settings: Any) -> soap.SOAP:
    return soap.SOAP(OptimizerConfig(optimizer="soap", **(BETAS | settings)))


def gradient(size: int, step: int) -> Tensor:
    """A matrix whose singular values are far apart, so that its factors' eigenvectors keep their order."""
    scales = 4.0 ** -torch.arange(size, dtype=torch.float64)
    left, right = (torch.linalg.qr(numbers((size, size), phase))[0] for phase in (3, 5))
    return (left * scales) @ right.mT + 0.02 * scales[-1] * numbers((size, size), 100 + 10 * step)


@pytest.mark.parametrize("case", PEER)
def test_six_steps_are_those_of_another_implementation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts with the eigenvectors of the first gradient's factors, and does not damp."""
    size, every = int(case.split(",")[0]), int(case.split()[-1])
    monkeypatch.setattr(soap, "DAMPING", 0.0)
    monkeypatch.setattr(soap, "scattered", lambda basis: basis)
    monkeypatch.setattr(soap, "FIRST_ITERATIONS", 1 if every == 1 else 0)
    rule, weight = algorithm(soap_precondition_frequency=every), numbers((size, size), 1)
    state = rule.new_state(weight, None)
    first = gradient(size, 0)
    for side, factor in (("left", 0.2 * first @ first.mT), ("right", 0.2 * first.mT @ first)):
        state[f"{side}_factor"].copy_(factor)
        state[f"{side}_basis"].copy_(torch.linalg.eigh(factor)[1].flip(1))
    for step in range(1, 7):
        weight -= 0.02 * rule.transform(gradient(size, step), None, state, Rates(step, 0.02, 0.0, 1.0, 1e-20))
    torch.testing.assert_close(
        weight, torch.tensor(PEER[case], dtype=torch.float64).view(size, size), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("size", [1, 2, 8, 32, 257])
def test_the_first_iteration_starts_from_an_orthogonal_matrix_without_zeros(size: int) -> None:
    start = soap.scattered(torch.zeros(size, size, dtype=torch.float64))
    torch.testing.assert_close(start.mT @ start, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    # The vector of ones of a head, or of all channels, is the null direction that a norm leaves.
    for width in {size, max(size // 4, 1)}:
        assert (start[:width].sum(0).abs() > 1e-9).all()


def paper(grads: list[Tensor], every: int, epsilon: float, *, sides: str) -> list[Tensor]:
    """Algorithm 3 for one matrix, element by element where it is Adam's, with damped factors."""
    rows, columns = grads[0].shape
    m, v = torch.zeros(2, rows, columns, dtype=torch.float64)
    factors = {
        "L": torch.zeros(rows, rows, dtype=torch.float64),
        "R": torch.zeros(columns, columns, dtype=torch.float64),
    }
    bases = {side: torch.eye(len(factor), dtype=torch.float64) for side, factor in factors.items()}
    updates = []
    for t, g in enumerate(grads, start=1):
        rotated = torch.einsum("ai,ab,bj->ij", bases["L"], g, bases["R"])
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * rotated**2
        mean = torch.einsum("ai,ab,bj->ij", bases["L"], m, bases["R"])
        step = torch.zeros_like(g)
        for i in range(rows):
            for j in range(columns):
                step[i, j] = mean[i, j] / (1 - 0.9**t) / ((v[i, j] / (1 - 0.95**t)) ** 0.5 + epsilon)
        updates.append(torch.einsum("ai,ij,bj->ab", bases["L"], step, bases["R"]))
        products = {"L": g @ g.T, "R": g.T @ g}
        for side in sides:
            factors[side] = 0.8 * factors[side] + 0.2 * products[side]
            size = len(factors[side])
            damped = factors[side] / (factors[side].trace() / size) + soap.DAMPING * torch.eye(size)
            if t == 1:
                bases[side] = soap.scattered(bases[side])
            for _ in range(soap.FIRST_ITERATIONS if t == 1 else t % every == 0):
                bases[side] = torch.linalg.qr(damped @ bases[side])[0]
    return updates


@pytest.mark.parametrize(
    ("shape", "fused", "settings"),
    [
        ((7, 4), None, {}),
        ((3, 4, 6), None, {"soap_precondition_frequency": 2}),
        ((16, 5), Fused((4, 2, 2), 2), {}),
        ((16, 5), Fused((4, 2, 2), 2), {"soap_split_qkv": False}),
        ((2, 8, 5), Fused((4, 4)), {"soap_split_gate_up": True}),
        ((8, 5), None, {"soap_max_precondition_dim": 6}),
    ],
    ids=["matrix", "experts, every other step", "qkv", "qkv as one", "gate and up of experts", "one side"],
)
def test_updates_are_the_papers(shape: tuple[int, ...], fused: Fused | None, settings: dict[str, Any]) -> None:
    """Of each expert and each of the matrices that are stored as one."""
    rule, generator = algorithm(**settings), torch.Generator().manual_seed(1)
    grads = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(5)]
    state = rule.new_state(grads[0], fused)
    found = [rule.transform(g.clone(), fused, state, Rates(t, 0.1, 0.0, 1.0, 1e-3)) for t, g in enumerate(grads, 1)]
    parts = [(slice(None),)] if len(shape) == 2 else [(expert, slice(None)) for expert in range(shape[0])]
    if fused is not None and settings.get("soap_split_qkv", True):
        block = sum(fused.rows)
        ends = [sum(fused.rows[: n + 1]) for n in range(len(fused.rows))]
        rows = [
            [row for row in range(shape[-2]) if end - count <= row % block < end]
            for end, count in zip(ends, fused.rows, strict=True)
        ]
        parts = [(*part[:-1], own) for part in parts for own in rows]
    for part in parts:
        every = settings.get("soap_precondition_frequency", 1)
        sides = "LR" if settings.get("soap_max_precondition_dim", 100) > 6 else "R"
        for own, expected in zip(found, paper([g[part] for g in grads], every, 1e-3, sides=sides), strict=True):
            torch.testing.assert_close(own[part], expected, rtol=0, atol=1e-9)


def test_a_factor_of_zeros_keeps_its_basis() -> None:
    """An expert without tokens has a gradient of zeros."""
    rule = algorithm()
    state = rule.new_state(torch.empty(2, 4, 3, dtype=torch.float64), None)
    grads = torch.zeros(2, 4, 3, dtype=torch.float64)
    grads[0] = numbers((4, 3), 1)
    updates = rule.transform(grads, None, state, Rates(1, 0.1, 0.0, 1.0))
    assert updates[0].abs().min() > 0.0
    assert not updates[1].any()
    assert torch.equal(state["left_basis"][1], torch.eye(4, dtype=torch.float64))
    assert not torch.allclose(state["left_basis"][0], torch.eye(4, dtype=torch.float64))


EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True, "swiglu": True}
RUN = EXPERTS | {"optimizer": "soap", "fp64": True, "lr_decay_style": "constant", "soap_precondition_frequency": 2}


def losses(settings: dict[str, Any], steps: int) -> list[float]:
    run = tiny_run(**RUN, **settings)
    found = [float(train_step(run).loss) for _ in range(steps)]
    if "save" in settings:
        run.saver.save(run.state)
    return found


def stored(folder: Path) -> dict[str, Tensor]:
    (found,) = folder.glob("iter_*")
    with CheckpointReader(found) as reader:
        return {name: reader.read(name) for name in reader.manifest.tensors}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "dp2 ep2 zero3": {"expert_model_parallel_size": 2, "zero_stage": 3},
}


def resumed(load: str, folder: str) -> list[list[float]]:
    """The losses of two steps in each layout, which first saves the loaded state in ``folder``."""
    found = []
    for layout, settings in LAYOUTS.items():
        losses(settings | {"load": load, "save": f"{folder}/{layout}"}, 0)
        found.append(losses(settings | {"load": load}, 2))
    return found


def test_resumes_in_another_layout(tmp_path: Path) -> None:
    """With exactly the state of the checkpoint."""
    expected, load = losses({}, 4), tmp_path / "before"
    assert run_ranks(2, losses, {"zero_stage": 1, "save": str(load)}, 2)[0] == pytest.approx(expected[:2])
    tensors = stored(load)
    assert {name.split(".")[1] for name in tensors if name.startswith("optimizer.")} > {"left_basis_2", "right_factor"}
    for found in run_ranks(2, resumed, str(load), str(tmp_path))[0]:
        assert found == pytest.approx(expected[2:], rel=1e-9)
    for layout in LAYOUTS:
        copied = stored(tmp_path / layout)
        assert copied.keys() == tensors.keys()
        assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items()), layout
    with pytest.raises(CheckpointError, match=r"left_basis.*use the settings with which"):
        losses({"load": str(load), "soap_split_qkv": False}, 0)
    whole = {"soap_split_qkv": False, "save": str(tmp_path / "whole")}
    losses(whole, 1)
    with pytest.raises(CheckpointError, match=r"\(left_basis_1.*; its soap_split_qkv is False: give the same"):
        losses({"load": str(tmp_path / "whole")}, 0)


def hashed() -> list[str]:
    """The hash of the optimizer's state, and the same after a change of one number of a basis."""
    run = tiny_run(**RUN)
    hashes = StateHashes(run.stages, run.data_parallel, run.optimizer, run.groups)
    found = [hashes.optimizer_state().total]
    next(piece.memory for piece in run.optimizer.joint_state() if "right_basis" in piece.name)[..., 0, 0] = 0.5
    return [*found, hashes.optimizer_state().total]


def test_hashes_of_the_state_include_that_of_matrices() -> None:
    (one,), (two, _) = run_ranks(1, hashed), run_ranks(2, hashed)
    assert one[0] == two[0], "the initial state is equal in both layouts"
    assert one[0] != one[1]
