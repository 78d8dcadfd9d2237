"""Programs with a loop of their own: errors they recover from, evaluation, resuming, changes of the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatron_core
from megatron_core.data_parallel.awaited_parameter import await_reads
from megatron_core.errors import CheckpointError, ConfigError, MegatronError
from megatron_core.parallel.collectives import Done
from megatron_core.verify.ranks import run_ranks
from tests.any_model.test_engine import BATCH, PLAIN, _mlp, _points, _run


def test_terms_may_be_weights_below_1() -> None:
    engine, _, loader, _ = megatron_core.initialize(_mlp(), PLAIN, training_data=_points(), shuffle=False)
    (expected,), norm = _run(engine, loader, 1), engine.last_report.grad_norm
    engine, _, loader, _ = megatron_core.initialize(_mlp(), PLAIN, training_data=_points(), shuffle=False)
    for batch in loader:
        engine.backward(engine(batch).square().mean() * 0.01, num_terms=0.01)
        if (report := engine.step()) is not None:
            break
    np.testing.assert_allclose([report.loss, report.grad_norm], [expected, norm], rtol=1e-9)


def test_evaluation_restores_the_mode_of_each_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    engine = megatron_core.initialize(model, PLAIN).engine
    model[1].eval()
    engine.eval_batch(iter([torch.ones(2, 4, dtype=torch.float64)] * BATCH), lambda output, batch: output.mean())
    assert [each.training for each in (model, *model)] == [True, True, False, True]


def test_loading_discards_an_incomplete_step(tmp_path: Path) -> None:
    engine, _, loader, _ = megatron_core.initialize(_mlp(), PLAIN, training_data=_points(), shuffle=False)
    _run(engine, loader, 1)
    engine.save_checkpoint(tmp_path)
    expected = _run(engine, loader, 1), engine.last_report.grad_norm
    engine.backward(engine(next(iter(loader))).sum())
    engine.step()
    engine.backward(engine(next(iter(loader))).sum())
    engine.load_checkpoint(tmp_path)
    assert (_run(engine, loader, 1), engine.last_report.grad_norm) == expected


def test_training_continues_after_a_loss_that_is_not_finite() -> None:
    batches = [point[None] for point in _points(BATCH)]
    engine = megatron_core.initialize(_mlp(), PLAIN).engine
    with pytest.raises(MegatronError, match="iteration 1: loss=nan"):
        _run(engine, [batch * torch.nan for batch in batches], 1)
    assert _run(engine, batches, 1) == _run(megatron_core.initialize(_mlp(), PLAIN).engine, batches, 1)


@pytest.mark.parametrize("value", [torch.ones(1), np.float32(1), {1: 2.0}])
def test_client_state_that_is_not_json(value: Any, tmp_path: Path) -> None:
    engine = megatron_core.initialize(_mlp(), PLAIN).engine
    with pytest.raises(CheckpointError, match=r"client_state\['best'\]=.* is not JSON; give numbers, strings"):
        engine.save_checkpoint(tmp_path, {"best": value})


def test_state_dict_waits_for_weights_of_other_ranks() -> None:
    for found, expected in run_ranks(2, _state_after_a_step):
        np.testing.assert_array_equal(found, expected)


def _state_after_a_step() -> tuple[Any, Any]:
    config = {
        **PLAIN,
        "zero_stage": 1,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "poison_buffers": True,
    }
    engine, _, loader, _ = megatron_core.initialize(_mlp(), config, training_data=_points())
    _run(engine, loader, 1)
    found = [tensor.numpy().copy() for tensor in engine.module.state_dict().values()]
    return np.concatenate([each.ravel() for each in found]), np.concatenate(
        [each.numpy().ravel() for each in engine.full_state_dict().values()]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model[0].requires_grad_(True), r"0\.weight has requires_grad=True, but was frozen"),
        (lambda model: model[2].bias.requires_grad_(False), r"2\.bias has requires_grad=False since"),
        (lambda model: model.append(nn.Linear(1, 1).double()), r"3\.weight has requires_grad=True, but was .* absent"),
    ],
    ids=["unfrozen", "frozen", "added"],
)
def test_parameters_that_change_during_a_run(change: Any, message: str) -> None:
    model = _mlp()
    model[0].requires_grad_(False)
    engine, _, loader, _ = megatron_core.initialize(model, PLAIN, training_data=_points())
    _run(engine, loader, 1)
    change(model)
    with pytest.raises(ConfigError, match=message):
        _run(engine, loader, 1)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_have_a_graph() -> None:
    reports = []
    for has_graph in (False, True):
        engine = megatron_core.initialize(_mlp(), PLAIN).engine
        for point in _points(BATCH):
            engine(point[None]).square().mean().backward(create_graph=has_graph)
            report = engine.step()
        reports.append(report.grad_norm)
    assert reports[0] == reports[1] > 0


def test_complex_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"1\.weight is torch\.complex64: complex parameters cannot be trained"):
        megatron_core.initialize(model, PLAIN)


class _Reader(nn.Module):
    """Reads the weight of a child that is not called, or has been called before."""

    def __init__(self, *, is_called: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_called, self.first, self.inner = is_called, nn.Linear(4, 32).double(), nn.Linear(32, 32).double()
        self.last = nn.Linear(32, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = self.inner(hidden).tanh() if self.is_called else hidden
        return self.last(hidden @ self.inner.weight)


def _train(model: nn.Module, units: list[str] | None = None, **settings: Any) -> tuple[np.ndarray, str]:
    """The weights after three steps of SGD, and the error."""
    engine = megatron_core.initialize(
        model, {**PLAIN, **settings}, torch.optim.SGD(model.parameters(), lr=0.1), unit_classes=units
    ).engine
    points = _points(3 * BATCH)
    try:
        for step in range(3):
            own = points[step * BATCH : (step + 1) * BATCH][engine.groups.index("dp") :: engine.groups.size("dp")]
            for point in own:
                engine.backward(engine(point[None]).square().mean())
                engine.step()
    except ConfigError as error:
        return np.zeros(0), str(error)
    return np.concatenate([weight.flatten() for weight in engine.full_state_dict().values()]), ""


OVERLAP = {"overlap_param_gather": True, "overlap_grad_reduce": True}


@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 2, **OVERLAP},
        {"zero_stage": 3},
        {"zero_stage": 3, **OVERLAP},
        {"zero_stage": 3, "units": ["_Reader"], **OVERLAP},
    ],
    ids=["stage 2, overlap", "stage 3", "stage 3, overlap", "stage 3, one unit"],
)
def test_weight_that_another_module_reads(settings: dict[str, Any], is_called: bool) -> None:  # C59
    def model() -> nn.Module:
        return nn.Sequential(_Reader(is_called=is_called))

    units = {"units": ["Linear"], **settings}
    (weights, error), *_ = run_ranks(2, lambda: _train(model(), **units))
    if settings["zero_stage"] == 2 or "units" in settings:
        np.testing.assert_allclose(weights, _train(model())[0], rtol=1e-9, atol=1e-12)
    else:
        where = " outside of its own module, and backward" if is_called else ": gather it with"
        assert "0.inner.weight of shape (32, 32)" in error and f"needs its elements{where}" in error


class _Shared(nn.Module):
    """Layers that have a weight of their own and call one module, which is outside of them or in the first."""

    class Layer(nn.Module):
        """Reads its own weight before it calls the shared module, and with ``is_last`` after it."""

        def __init__(self, shared: Any, *, is_last: bool) -> None:
            super().__init__()
            self.shared, self.is_last = shared, is_last
            self.weight = nn.Parameter(torch.randn(32, 32, dtype=torch.float64) / 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = (self.shared[0] if isinstance(self.shared, list) else self.shared)((x @ self.weight).tanh()).sin()
            return hidden @ self.weight if self.is_last else hidden

    def __init__(self, *, is_outside: bool, is_last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 32).double(), nn.Linear(32, 1).double()
        self.shared = nn.Linear(32, 32).double()
        shared = [self.shared] if is_outside else self.shared
        self.layers = nn.Sequential(*(self.Layer(shared, is_last=is_last) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.first(x)))


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("is_outside", [True, False])
def test_modules_of_several_units_that_call_one_module(*, is_outside: bool, is_last: bool) -> None:
    def model() -> nn.Module:
        return _Shared(is_outside=is_outside, is_last=is_last)

    expected = _train(model())[0]
    for settings in ({}, OVERLAP):
        (weights, error), *_ = run_ranks(2, lambda: _train(model(), ["Layer"], zero_stage=3, **settings))  # noqa: B023
        assert error == ""
        np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-12)


class _Failing(_Reader):
    """Fails in its first forward, inside of ``inner``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, is_first = self.first(x), not hasattr(self, "has_failed")
        self.has_failed = True
        return super().forward(x) if not is_first else self.inner(hidden[..., 1:])


def test_weights_are_guarded_after_a_forward_that_has_failed() -> None:
    def run() -> str:
        model = _Failing(is_called=True)
        settings = {**PLAIN, "zero_stage": 3}
        engine = megatron_core.initialize(
            model, settings, torch.optim.SGD(model.parameters(), lr=0.1), unit_classes=["Linear"]
        ).engine
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine(_points(1)[0][None])
        try:
            engine(_points(1)[0][None])
        except ConfigError as error:
            return str(error)
        return ""

    (message, *_) = run_ranks(2, run)
    assert "inner.weight of shape (32, 32)" in message and "outside of its own module" in message


@pytest.mark.parametrize("reads", ["data_ptr", "untyped_storage"])
def test_kernels_that_torch_does_not_call_wait_for_weights(reads: str) -> None:  # C59
    parameter, waited = nn.Parameter(torch.ones(2)), []
    arrival = await_reads([parameter], Done(), lambda: (waited.append(1), arrival.wait()))
    assert parameter.shape == (2,) and not waited
    getattr(parameter, reads)()
    assert waited and type(parameter) is nn.Parameter


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_a_hook_computes_are_those_of_the_last_step() -> None:  # C59
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), nn.utils.weight_norm(nn.Linear(32, 1))).double()

    expected = _train(model())[0]
    for settings in ({"zero_stage": 2, **OVERLAP}, {"zero_stage": 3}):
        (weights, _), *_ = run_ranks(2, lambda: _train(model(), ["Linear"], **settings))  # noqa: B023
        np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("keeps", [True, False])
def test_second_derivatives_at_stage_3(keeps: bool) -> None:
    def step() -> str:
        settings = {**PLAIN, "zero_stage": 3, "zero3_keep_after_forward": keeps}
        engine = megatron_core.initialize(_mlp(), settings).engine
        x = _points(1)[0][None].requires_grad_()
        loss = engine(x).square().mean()
        try:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        except ConfigError as error:
            return str(error)
        engine.backward(loss + slope.square().sum())
        return ""

    (message, *_) = run_ranks(2, step)
    assert message == "" if keeps else "create_graph=True at zero_stage=3" in message


@pytest.mark.parametrize("stage", [2, 3])
def test_transforms_of_torch_func(stage: int) -> None:
    """Jacobians of a sharded model: by transforms at stage 2, by autograd at stage 3, where transforms are refused."""

    def jacobians() -> tuple[str, bool]:
        model = _mlp().double()
        points = _points(1)[0][None]
        expected = torch.func.vmap(torch.func.jacrev(model))(points)
        engine = megatron_core.initialize(model, {**PLAIN, "zero_stage": stage}).engine
        by_autograd = torch.autograd.functional.jacobian(engine, points[0])
        equal = torch.allclose(by_autograd, expected[0], rtol=1e-12)
        try:
            found = torch.func.vmap(torch.func.jacrev(lambda x: engine(x)))(points)
        except ConfigError as error:
            return str(error), equal
        return "", equal and torch.allclose(found, expected, rtol=1e-12)

    (message, is_equal), *_ = run_ranks(2, jacobians)
    assert is_equal and ("transform of torch.func gathers" in message) == (stage == 3), message


def test_compiled_model_at_stage_3() -> None:
    model = torch.compile(_mlp(), backend="eager")
    with pytest.raises(ConfigError, match=r"result of torch\.compile"):
        megatron_core.initialize(model, {**PLAIN, "zero_stage": 3})
    model = _mlp()
    model[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"0 is compiled by its method compile\(\)"):
        megatron_core.initialize(model, {**PLAIN, "zero_stage": 3})


def test_model_that_is_compiled_in_place_waits_for_its_weights_outside_of_graphs() -> None:  # C59
    def run() -> tuple[np.ndarray, dict[str, int]]:
        model = _mlp()
        model.compile(backend="eager")
        weights, error = _train(model, zero_stage=1, **OVERLAP)
        assert error == ""
        return weights, dict(torch._dynamo.utils.counters["graph_break"])

    expected = _train(_mlp())[0]
    for weights, breaks in run_ranks(2, run):
        np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-12)
        assert not breaks


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norm_in_bfloat16(stage: int) -> None:
    engine, losses = _train_images({"bf16": True, "zero_stage": stage})
    _, expected = _train_images({})
    norm = engine.module[0][1]
    assert norm.running_mean.dtype == torch.float32
    assert int(norm.num_batches_tracked) == 4
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    engine.eval()
    image = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(engine.module)(image.bfloat16()), engine(image), rtol=0, atol=0)


def _train_images(settings: dict[str, Any]) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 1)),
    )
    config = {"micro_batch_size": 4, "global_batch_size": 4, "lr": 1e-3, **settings}
    engine, losses = megatron_core.initialize(model, config).engine, []
    for step in range(4):
        image = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(image).float().square().mean())
        losses.append(engine.step().loss)
    return engine, losses


@pytest.mark.parametrize(
    "settings",
    [{"recompute_granularity": "full"}, {"cpu_offloading": True, "cpu_offloading_num_layers": 2}],
    ids=["recomputed", "offloaded"],
)
def test_copies_of_the_model_have_weights_of_their_own(settings: dict[str, Any]) -> None:
    engine = megatron_core.initialize(_mlp(), {**PLAIN, **settings}).engine
    average = torch.optim.swa_utils.AveragedModel(engine.module)
    batches = [point[None] for point in _points(BATCH)]
    before = engine.module(batches[0]).item()
    _run(engine, batches, 1)
    assert engine.module(batches[0]).item() != before
    assert average(batches[0]).item() == before


def test_gradients_from_before_are_not_added() -> None:
    steps = []
    for has_gradients in (False, True):
        model = _mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if has_gradients:  # a program has tried its model
            model(_points(1)[0]).sum().backward()
        engine = megatron_core.initialize(model, PLAIN, optimizer).engine
        optimizer.zero_grad()
        steps.append((_run(engine, [point[None] for point in _points(BATCH)], 1), engine.last_report.grad_norm))
    assert steps[0] == steps[1]


def test_the_batch_of_a_step_cannot_change_within_it() -> None:
    engine = megatron_core.initialize(_mlp(), PLAIN).engine
    message = rf"set_batch_size after 1 of {BATCH} micro-batches.*call it after the step"
    engine.backward(engine(_points(1)[0][None]).square().mean())
    with pytest.raises(ConfigError, match=message):
        engine.set_batch_size(1, 1)
    engine.step()
    with pytest.raises(ConfigError, match=message):
        engine.set_batch_size(1, 1)


HALF = {"bf16": True, "global_batch_size": 1}
SINGLE = {**PLAIN, "fp64": False}


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        (SINGLE, lambda model: model.double().float(), r"\d\.\w+ was moved to other memory"),
        (PLAIN, lambda model: setattr(model[2].bias, "data", model[2].bias.data + 1), r"2\.bias was moved to other"),
        (HALF, lambda model: model.load_state_dict(model.state_dict()), r"\d\.\w+ was changed in place"),
        (HALF, lambda model: nn.init.zeros_(model[2].weight), r"2\.weight was changed in place.*engine\.gathered"),
    ],
    ids=["dtype", "data", "state_dict", "init"],
)
def test_changes_of_weights_that_a_step_would_undo(settings: dict[str, Any], change: Any, message: str) -> None:
    model = _mlp()
    engine = megatron_core.initialize(model, settings).engine
    batches = [point[None].to(model[0].weight.dtype) for point in _points(BATCH)]
    _run(engine, batches, 1)
    change(model)
    with pytest.raises(ConfigError, match=message):
        _run(engine, batches, 1)


def test_changes_of_weights_that_stay(tmp_path: Path) -> None:
    model, twin = _mlp(), _mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_twin = torch.optim.SGD(twin.parameters(), lr=0.1)
    engine = megatron_core.initialize(model, {**PLAIN, "clip_grad": 0.0}, optimizer).engine
    batches = [point[None] for point in _points(BATCH)]
    for _ in range(2):
        _run(engine, batches, 1)
        of_twin.zero_grad()
        twin(torch.cat(batches)).square().mean().backward()
        of_twin.step()
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.data.clamp_(-0.3, 0.3)
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-14)
    # Main weights follow in a context, and are loaded.
    engine = megatron_core.initialize(_mlp(), HALF).engine
    with engine.gathered(engine.module.parameters(), modify=True):
        engine.module.load_state_dict({name: torch.zeros_like(w) for name, w in engine.module.state_dict().items()})
    _run(engine, batches, 1)
    engine.save_checkpoint(tmp_path)
    nn.init.ones_(engine.module[0].weight)
    engine.load_checkpoint(tmp_path)
    _run(engine, batches, 1)
    assert engine.whole.weights(engine.module[0].weight).abs().max() < 0.1


class _Codebook(nn.Module):
    """A frozen matrix that the forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.layer = nn.Parameter(torch.zeros(4, 4), requires_grad=False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes[0].add_(4.0)  # at stage 3 the part of one rank
        return self.layer(x) + self.codes.sum()


def test_frozen_weights_that_a_forward_changes() -> None:
    for stage, text in run_ranks(2, _with_codebook, 1) + run_ranks(2, _with_codebook, 3):
        assert text == ("2.0" if stage == 1 else "codes was changed in place")


def _with_codebook(stage: int) -> tuple[int, str]:
    model = _Codebook()
    engine = megatron_core.initialize(model, {"zero_stage": stage, "global_batch_size": 2}).engine
    try:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4)).mean())
            engine.step()
    except ConfigError as error:
        return stage, str(error).split(" since")[0]
    return stage, str(model.codes.mean().item())


def test_parameters_with_one_memory() -> None:  # C11
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are two parameters in the same memory"):
        megatron_core.initialize(model, {})


def test_frozen_weights_and_buffers_of_any_layout(tmp_path: Path) -> None:
    for found, expected in run_ranks(2, _of_any_layout, str(tmp_path)):
        np.testing.assert_array_equal(found, expected)


def _of_any_layout(folder: str) -> tuple[np.ndarray, np.ndarray]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model[0].weight = nn.Parameter(torch.arange(12.0).view(4, 3).t(), requires_grad=False)
    model.register_buffer("scales", torch.tensor([[2.0]]).expand(3, 5))
    engine = megatron_core.initialize(model, {"global_batch_size": 2}).engine
    engine.save_checkpoint(folder)
    saved = torch.cat([model[0].weight.flatten(), model.scales.flatten()]).numpy()
    with torch.no_grad():
        model[0].weight.zero_()
        model.scales.zero_()
    engine.load_checkpoint(folder)
    return torch.cat([model[0].weight.flatten(), model.scales.flatten()]).numpy(), saved


def test_backward_of_a_forward_before_the_last_step() -> None:
    model = _mlp()
    engine = megatron_core.initialize(model, {**PLAIN, "global_batch_size": 1}).engine
    point = _points(1)[0][None]
    early = engine(point).square().mean()
    engine.backward(engine(point).square().mean())
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as with optimizers of torch
        engine.backward(early)
