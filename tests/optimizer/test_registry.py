"""The table of optimizers: every row is true of memory and checkpoints, and a user's optimizer works everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.checkpoint.manifest import MANIFEST, TORCH_DTYPES, Manifest
from megatron_core.config import OptimizerConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.config.optimizers import OPTIMIZERS, Moment, OptimizerKind, optimizer_kinds, optimizer_problems
from megatron_core.config.rules_single import unread_settings
from megatron_core.config.validate import problems
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.sgd_and_lion.updates import SGD
from megatron_core.optimizer import Algorithm, Rates, ShardSlice, register_optimizer, write_copy
from megatron_core.optimizer.algorithms import AdamW
from megatron_core.parallel import ParallelGroups
from megatron_core.planner.footprint import Footprint
from megatron_core.planner.parameters import rank_units
from megatron_core.reports.dry_run import RankEstimate
from megatron_core.reports.memory_report import planned_bytes
from megatron_core.training.step import train_step
from megatron_core.verify.gpt import GPTExperiment
from megatron_core.verify.parity import check_parity
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_config, tiny_run

NARROW = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
WHOLE = {"vocab_size": 64}
"""No padding: neither of the vocabulary nor of buckets."""
FACTORS = ("left_factor", "right_factor", "left_basis", "right_basis")
STATES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "adam": ({}, {"exp_avg", "exp_avg_sq"}),
    "adam, bf16": ({"bf16": True}, {"exp_avg", "exp_avg_sq", "main"}),
    "adam, bf16 moments": (NARROW, {"exp_avg", "exp_avg_sq", "main"}),
    "adam, bf16 moments, no main weights": (NARROW | {"main_params_dtype": "bf16"}, {"exp_avg", "exp_avg_sq"}),
    "adam, float64": ({"fp64": True}, {"exp_avg", "exp_avg_sq"}),
    "sgd": ({"optimizer": "sgd"}, {"momentum_buffer"}),
    "sgd, bf16 moments": ({"optimizer": "sgd"} | NARROW, {"momentum_buffer", "main"}),
    "sgd without momentum": ({"optimizer": "sgd", "sgd_momentum": 0.0}, set()),
    "sgd without momentum, bf16": ({"optimizer": "sgd", "sgd_momentum": 0.0, "bf16": True}, {"main"}),
    "lion": ({"optimizer": "lion"}, {"exp_avg"}),
    "muon": ({"optimizer": "muon"}, {"momentum_buffer", "exp_avg", "exp_avg_sq"}),
    "adamuon": (
        {"optimizer": "adaptive_muon"},
        {"momentum_buffer", "moment2_buffer", "exp_avg", "exp_avg_sq"},
    ),
    "normuon of experts, bf16": (
        {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon", "swiglu": True, "bf16": True}
        | {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True},
        {"momentum_buffer", "moment2_buffer", "exp_avg", "exp_avg_sq", "main"},
    ),
    "soap": (
        {"optimizer": "soap"},
        {"exp_avg", "exp_avg_sq", *FACTORS, *(f"{name}_{n}" for name in FACTORS for n in (1, 2))},
    ),
    "soap, bf16, scalars by lion": (
        {"optimizer": "soap", "bf16": True, "soap_scalar_optimizer": "lion", "soap_split_qkv": False},
        {"exp_avg", "exp_avg_sq", "main", *FACTORS},
    ),
    "lamb": ({"optimizer": "lamb"}, {"exp_avg", "exp_avg_sq"}),
    "muon, scalars by lion": ({"optimizer": "muon", "muon_scalar_optimizer": "lion"}, {"momentum_buffer", "exp_avg"}),
    "muon, bf16 moments": (
        {"optimizer": "muon"} | NARROW | {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True},
        {"momentum_buffer", "exp_avg", "exp_avg_sq", "main"},
    ),
}


def test_every_optimizer_is_compared() -> None:
    assert {settings.get("optimizer", "adam") for settings, _ in STATES.values()} == {
        name
        for name in optimizer_kinds()
        if not name.startswith("torch ")  # other tests register classes of torch
    }
    named = {name for kind in optimizer_kinds().values() for name in kind.settings}
    assert named <= tiny_config().flat().keys()


@pytest.mark.parametrize(("settings", "expected"), STATES.values(), ids=STATES)
def test_planned_allocated_and_saved_state_are_equal(
    settings: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    settings = WHOLE | settings
    run = tiny_run(**settings, save=str(tmp_path))
    train_step(run)
    allocated = run.state_bytes()
    assert planned_bytes(run) == sum(allocated.values())
    found = RankEstimate.of(tiny_config(**settings), 1)
    units = rank_units(found.config, found.layers, found.plan.stage_to_rank, found.vocab_size)
    predicted = Footprint.of(found.config, 1, found.plan, found.layers, units, found.vocab_size).state(0)
    assert {kind: predicted[kind] for kind in ("weights", "gradients", "optimizer")} == {
        kind: allocated[kind] for kind in ("weights", "gradients", "optimizer")
    }
    run.saver.save(run.state)
    (path,) = tmp_path.glob(f"iter_*/{MANIFEST}")
    stored = {name: each for name, each in Manifest.read(path).tensors.items() if name.startswith("optimizer.")}
    assert {name.split(".")[1] for name in stored} == expected
    saved = sum(prod(each.shape) * TORCH_DTYPES[each.dtype].itemsize for each in stored.values())
    assert saved == allocated["optimizer"]


def test_sgd_without_momentum_is_torchs() -> None:
    algorithm = SGD(OptimizerConfig(optimizer="sgd", sgd_momentum=0.0), "auto", ParallelGroups.single())
    main, grad = (torch.randn(50, dtype=torch.float64) for _ in range(2))
    weight = main.clone().requires_grad_()
    weight.grad = grad.clone()
    torch.optim.SGD([weight], lr=0.2, weight_decay=0.1).step()
    algorithm.update([ShardSlice(2.0 * grad, main, None, {})], Rates(1, 0.2, 0.1, 0.5))
    torch.testing.assert_close(main, weight.detach(), rtol=1e-12, atol=1e-14)


def test_sgd_without_momentum_in_every_layout_is_that_of_one_process() -> None:
    experiment = GPTExperiment(tiny_config(optimizer="sgd", sgd_momentum=0.0, clip_grad=0.1), steps=3)
    report = check_parity(experiment, ["dp2 zero1", "dp2 zero3", "dp2 tp2 zero2"])
    assert all(row.holds for row in report.rows), report.as_dict()


def test_resuming_with_momentum_needs_its_state(tmp_path: Path) -> None:
    run = tiny_run(optimizer="sgd", sgd_momentum=0.0, save=str(tmp_path))
    run.saver.save(run.state)
    with pytest.raises(CheckpointError, match=r"no state of --optimizer sgd \(momentum_buffer\).*--no-load-optim"):
        tiny_run(optimizer="sgd", load=str(tmp_path))


def test_resuming_without_momentum_ignores_its_state(tmp_path: Path) -> None:
    run = tiny_run(optimizer="sgd", save=str(tmp_path))
    train_step(run)
    run.saver.save(run.state)
    resumed = tiny_run(optimizer="sgd", sgd_momentum=0.0, load=str(tmp_path))
    for before, after in zip(run.optimizer.shards, resumed.optimizer.shards, strict=True):
        assert not after.state and torch.equal(before.main, after.main)
    train_step(resumed)


def test_an_unknown_optimizer_is_refused() -> None:
    (problem,) = problems(tiny_config(optimizer="adamz"), 1)
    # Engines of other tests in this process have registered optimizers of torch.
    assert problem.startswith("optimizer=adamz is unknown; legal: adam, sgd, lion, lamb, muon, adaptive_muon, soap")
    with pytest.raises(ConfigError, match="'adam' is already registered"):
        register_optimizer(OPTIMIZERS["adam"], AdamW)
    with pytest.raises(ConfigError, match="'soap' is already registered"):
        register_optimizer(optimizer_kinds()["soap"], AdamW)


class Adagrad(Algorithm):
    """Duchi et al. 2011: s = s + g^2; w = w - lr g / (sqrt(s) + eps)."""

    def __init__(self, *args: Any, decay: float = 1.0) -> None:
        super().__init__(*args)
        self.decay = decay

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        for piece in pieces:
            grad = piece.grad.mul_(rates.factor)
            squares = piece.state["sum_of_squares"].mul_(self.decay).addcmul_(grad, grad)
            piece.main.mul_(1.0 - rates.lr * rates.weight_decay)
            piece.main.addcdiv_(grad, squares.sqrt().add_(rates.epsilon), value=-rates.lr)
            write_copy(piece)


ADAGRAD = OptimizerKind(
    name="adagrad", all_moments=(Moment("sum_of_squares", dtype_setting=None),), settings=("adam_eps",)
)


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    yield lambda rule: register_optimizer(ADAGRAD, rule)
    OPTIMIZERS.pop("adagrad", None)


def test_an_optimizer_of_a_user_is_torchs(registered: Callable[..., None]) -> None:
    registered(Adagrad)
    settings = {"optimizer": "adagrad", "fp64": True, "clip_grad": 0.0, "weight_decay": 0.0, "adam_eps": 1e-10}
    run = tiny_run(**settings, lr_decay_style="constant", lr=0.05)
    weights = [parameter for bucket in run.data_parallel.buckets for parameter in bucket.parameters]
    copies = [weight.detach().clone().requires_grad_() for weight in weights]
    theirs = torch.optim.Adagrad(copies, lr=0.05, eps=1e-10)

    def keep_gradients() -> None:
        for weight, copy in zip(weights, copies, strict=True):
            copy.grad = weight.main_grad.detach().clone()

    run.optimizer.before_update = keep_gradients
    for _ in range(3):
        train_step(run)
        theirs.step()
    for weight, copy in zip(weights, copies, strict=True):
        torch.testing.assert_close(weight.detach(), copy.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
def test_the_planner_prices_an_optimizer_of_a_user(
    settings: dict[str, Any], registered: Callable[..., None], tmp_path: Path
) -> None:
    registered(Adagrad)
    names = {"sum_of_squares", "main"} if settings else {"sum_of_squares"}
    test_planned_allocated_and_saved_state_are_equal(settings | {"optimizer": "adagrad"}, names, tmp_path)
    config = tiny_config(optimizer="adagrad", adam_eps=1e-6, adam_beta1=0.8, use_precision_aware_optimizer=True)
    assert unread_settings(config) == (
        "adam_beta1=0.8 (without --optimizer adam); "
        "use_precision_aware_optimizer=True (without --main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype bf16)"
    )


def test_an_optimizer_of_a_user_in_every_layout_is_that_of_one_process(registered: Callable[..., None]) -> None:
    registered(partial(Adagrad, decay=0.9))
    experiment = GPTExperiment(tiny_config(optimizer="adagrad", adam_eps=1e-3), steps=3)
    report = check_parity(experiment, ["dp2 zero1", "dp2 zero2", "dp2 tp2 zero1"])
    assert all(row.holds for row in report.rows), report.as_dict()


def _losses(settings: dict[str, Any], steps: int) -> list[float]:
    run = tiny_run(**settings)
    losses = [float(train_step(run).loss) for _ in range(steps)]
    if "save" in settings:
        run.saver.save(run.state)
    return losses


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_of_a_user_resumes(stage: int, registered: Callable[..., None], tmp_path: Path) -> None:
    registered(Adagrad)
    settings = {"optimizer": "adagrad", "fp64": True, "adam_eps": 1e-3, "lr_decay_style": "constant"}
    sharded = settings | {"zero_stage": stage}
    expected = run_ranks(2, _losses, sharded, 4)[0]
    assert expected == pytest.approx(_losses(settings, 4), rel=1e-9)
    assert run_ranks(2, _losses, sharded | {"save": str(tmp_path)}, 2)[0] == expected[:2]
    assert run_ranks(2, _losses, sharded | {"load": str(tmp_path)}, 2)[0] == expected[2:]
    assert _losses(settings | {"load": str(tmp_path)}, 2) == pytest.approx(expected[2:], rel=1e-9)


def test_the_names_of_the_pages_are_understood() -> None:
    """README and docs/data_parallel.md name algorithms; each is legal, or the error says how to select it."""
    readme, page = (" ".join(Path(name).read_text().split()) for name in ("README.md", "docs/data_parallel.md"))
    algorithms = readme.split("compressed gradients, DiLoCo; ")[1].split(";")[0].split(", ")
    assert {"AdamW", "SGD", "Muon", "MuonClip", "SOAP"} <= set(algorithms)
    names = page.split("`--optimizer ")[1].split("`")[0].split("|")
    # Other tests register classes of torch.
    assert names == [name for name in optimizer_kinds() if not name.startswith("torch ")]
    for name in (*algorithms, *names):
        config = parse_run_config(["--optimizer", name])
        found = " ".join(optimizer_problems(config.optimizer))
        assert config.optimizer.optimizer in optimizer_kinds() or "it is --optimizer " in found
        for flags in found.split("it is ")[1:]:
            assert not list(optimizer_problems(parse_run_config(flags.split()).optimizer))
