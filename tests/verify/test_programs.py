"""Other libraries' programs: a step on several ranks is compared with the step on one, and public bugs are located."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.megatron_peer import MEGATRON
from examples.first_difference import fsdp2, megatron_gpt
from megatron_core.errors import DataError, MegatronError
from megatron_core.verify import compare, run_ranks
from megatron_core.verify.parts import Block, possible_parts, sliced
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask


def differences(program: Callable[..., list[str]], folder: Path, *arguments: object) -> list[str]:
    """Run a program on one rank and on two; return the differences."""
    torch.set_num_threads(1)
    assert run_ranks(1, program, str(folder), *arguments, backend="gloo") == [[]]
    return run_ranks(2, program, str(folder), *arguments, backend="gloo")[0]


# --- Parts of a tensor


def test_parts_by_every_axis() -> None:
    whole = np.arange(8 * 6.0).reshape(8, 6)
    axes = {"tp": (1, 2), "cp": (0, 2)}
    rows = [part[:, 0].tolist() for part in possible_parts(whole, (4, 6), axes)]
    assert [24.0, 30.0, 36.0, 42.0] in rows  # the second half, of tp
    assert [0.0, 6.0, 36.0, 42.0] in rows  # the first and the last quarter, of causal context parallelism
    assert [12.0, 18.0, 36.0, 42.0] in rows  # the second halves of two joined matrices
    both = [part.tolist() for part in possible_parts(whole, (4, 3), axes)]
    assert whole[:4, 3:].tolist() in both  # cp splits rows, tp columns
    assert not list(possible_parts(whole, (3, 6), axes))
    assert [part.shape for part in possible_parts(whole, (8, 6), axes)] == [(8, 6)]


def test_weights_are_cut_as_their_attributes_say() -> None:
    whole = torch.arange(8.0).view(8, 1)
    assert sliced(whole, (4, 1), {"tp": (1, 2)}, Block(0, 1)).flatten().tolist() == [4.0, 5.0, 6.0, 7.0]
    assert sliced(whole, (4, 1), {"tp": (1, 2)}, Block(0, 2)).flatten().tolist() == [2.0, 3.0, 6.0, 7.0]
    assert sliced(whole, (5, 1), {"tp": (1, 2)}, Block(0, 1)).flatten().tolist() == [5.0, 6.0, 7.0, 0.0, 0.0]


# --- A program with Megatron's names: stages, micro-batches, layers that know their number


class Layer(nn.Module):
    """A layer whose weight is split over columns of its input, with a sum over the ranks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.weight = nn.Parameter(torch.empty(4, 4 // dist.get_world_size(), dtype=torch.float64))
        nn.init.normal_(self.weight)
        vars(self.weight).update(tensor_model_parallel=True, partition_dim=1, partition_stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """The sum over all ranks of the products of their channels."""
        part = x.chunk(dist.get_world_size(), -1)[dist.get_rank()] @ self.weight.T
        total: Tensor = _Sum.apply(part)
        return torch.tanh(total)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Stage(nn.Module):
    """Two layers of a model of four."""

    def __init__(self, first: int, *, forgets: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(first + 1 + number) for number in range(2))
        self._forgets = forgets

    def forward(self, x: Tensor) -> Tensor:
        """The output of both layers; ``forgets``: the gradient before the second is a part."""
        for number, layer in enumerate(self.layers):
            x = layer(x if self._forgets and number == 1 else _Copy.apply(x))
        return x


def two_stages(folder: str, bug: str = "") -> list[str]:
    """A step of two chunks over two micro-batches."""
    torch.manual_seed(dist.get_rank())
    stages = [Stage(0, forgets=False), Stage(2, forgets=bug == "layer 3")]
    watch = compare(stages, folder, tp=(dist.get_rank(), dist.get_world_size()))
    torch.manual_seed(9)
    for number, x in enumerate(torch.randn(2, 3, 4, dtype=torch.float64)):
        watch.micro_batch(number)
        loss = stages[1](stages[0](x)).square().sum() * (1.5 if bug == "loss" and dist.get_world_size() > 1 else 1.0)
        loss.backward()
    watch.value("loss", loss.detach())
    watch.gradients()
    return watch.finish()


def test_sound_program(tmp_path: Path) -> None:
    assert differences(two_stages, tmp_path) == []


def test_first_difference_of_stages(tmp_path: Path) -> None:
    """Backward meets the layer after the forgotten sum first, by its number in the whole model."""
    found = differences(two_stages, tmp_path, "layer 3")
    assert found[0].startswith("gradient of the output of layers.2, in backward of micro-batch 0, on rank 0 (off by ")
    assert not [text for text in found if "layers.3" in text]
    assert any("gradient of the parameter layers.2.weight" in text for text in found)


def test_a_multiple_is_named(tmp_path: Path) -> None:
    found = differences(two_stages, tmp_path, "loss")
    assert "gradient of the output of layers.3" in found[0]
    assert found[0].endswith(": it is 1.5 times the right value")
    assert any(text.startswith("loss, on rank 1") for text in found)


def test_a_run_without_a_record_says_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"run the program on one rank first") as caught:
        run_ranks(2, two_stages, str(tmp_path))
    assert DataError.__name__ in str(caught.value)


# --- Names


class Middle(nn.Module):
    """A layer of a user whose parts have names of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        """A product."""
        y: Tensor = self.module(x) * self.scale
        return y


def wrapped(folder: str, bug: str = "") -> list[str]:
    """A step of a model that has wrappers on several ranks only."""
    torch.manual_seed(0)
    size, rank = dist.get_world_size(), dist.get_rank()
    body = nn.Sequential(nn.Linear(4, 4), Middle(), nn.Linear(4, 4), nn.LayerNorm(4)).double()
    model: nn.Module = body
    if size > 1:
        body[0] = cast(nn.Module, torch.compile(checkpoint_wrapper(body[0]), backend="eager"))
        body[1] = checkpoint_wrapper(body[1])
        body[2] = DistributedDataParallel(body[2])
        model = cast(nn.Module, torch.compile(DistributedDataParallel(body), backend="eager"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no rank compared|the record does not have")
        watch = compare(model, folder, averaged=size, dp=(rank, size))
        torch.manual_seed(1)
        for number, x in enumerate(torch.randn(2, 4, 4, dtype=torch.float64)):
            watch.micro_batch(number)
            factor = 2.0 if bug and rank == 1 and number == 1 else 1.0
            (model(x.chunk(size)[rank]).square() * factor).mean().backward()
        watch.gradients()
        return watch.finish()


def test_names_below_wrappers(tmp_path: Path) -> None:
    """Also a layer's own part with the name ``module`` is compared."""
    assert differences(wrapped, tmp_path) == []
    found = run_ranks(2, wrapped, str(tmp_path), "loss", backend="gloo")[0]
    assert found[0].startswith("gradient of the output of 3, in backward of micro-batch 1, on rank 1")
    for name in ("0.weight", "1.scale", "1.module.weight", "2.bias", "3.weight"):
        assert any(text.startswith(f"gradient of the parameter {name}, on rank 0") for text in found), name


def one_sided(folder: str, case: str) -> list[str]:
    """A step whose names differ on several ranks."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    names = ("a", "b") if size == 1 or case in ("none called", "no gradient") else ("a", "c")
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))
    if case == "other names" and size > 1:
        model = nn.Sequential(OrderedDict(x=nn.Sequential(OrderedDict(y=model))))
    watch = compare(model, folder, copy_weights=False)
    if case != "none called" or size == 1:
        called = model[0] if len(model) == 1 else model  # the root has no name
        called(torch.ones(2, 4)).sum().backward()
    if case == "no gradient" and size > 1:
        watch.gradients(lambda parameter: None if parameter.ndim == 1 else parameter.grad)
    else:
        watch.gradients()
    if size == 1 or case == "names":
        watch.value("loss" if size == 1 else "the loss", 1.0)
    return watch.finish()


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        (
            "names",
            [
                "no rank compared: gradient of the parameter b.weight, gradient of the parameter b.bias, loss",
                "the record does not have: "
                "gradient of the parameter c.weight, gradient of the parameter c.bias, the loss",
            ],
        ),
        ("no gradient", ["no rank compared: gradient of the parameter a.bias, gradient of the parameter b.bias, loss"]),
    ],
)
def test_what_one_run_has_alone_is_named(case: str, lines: list[str], tmp_path: Path) -> None:
    assert differences(one_sided, tmp_path, case) == lines


@pytest.mark.parametrize(("case", "reason"), [("other names", "output of x.y.a"), ("none called", "no tensors")])
def test_a_run_that_compares_nothing_fails(case: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=rf"nothing was compared.*this run has {reason}") as caught:
        differences(one_sided, tmp_path, case)
    assert DataError.__name__ in str(caught.value)


def uneven(folder: str) -> list[str]:
    """On several ranks the second has a parameter more than the record."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model[0], mesh, ColwiseParallel())
    models: list[nn.Module] = [model]
    if dist.get_rank() == 1:
        models.insert(0, nn.ModuleDict({"more": nn.Linear(4, 4)}))
    try:
        return compare(models, folder).finish()
    except MegatronError as error:
        return [str(error)]


def test_a_parameter_without_a_record_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Another rank does not wait for it while it gets its parts of the weights."""
    torch.set_num_threads(1)
    run_ranks(1, uneven, str(tmp_path), backend="gloo")
    for (text,) in run_ranks(2, uneven, str(tmp_path), backend="gloo"):
        assert "the record has no parameter more.weight" in text


# --- Public bugs of others


@pytest.mark.drawn(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("program", "bug", "first"),
    [
        (fsdp2.split_heads, "", None),
        (fsdp2.split_heads, "shared_key", "gradient of the output of 0.key, in backward"),
        (fsdp2.sharded, "", None),
        (fsdp2.sharded, "mean_of_means", "gradient of the output of 2, in backward"),
    ],
)
def test_dtensors_and_fsdp2(program: Callable[..., list[str]], bug: str, first: str | None, tmp_path: Path) -> None:
    found = differences(program, tmp_path, bug)
    assert found[0].startswith(first) if found and first else not found and first is None, found[:3]


@pytest.mark.skipif(not (REFERENCE / "deepspeed").exists(), reason="needs DeepSpeed")
@pytest.mark.parametrize(("bug", "first"), [("", None), ("manual_accumulation", "gradient of the parameter 0.weight")])
def test_deepspeed(bug: str, first: str | None, tmp_path: Path) -> None:
    step = "examples.first_difference.zero2:step"
    assert ask(Task(step, (str(tmp_path), bug), 1)) == []
    found = ask(Task(step, (str(tmp_path), bug), 2))
    assert found[0].startswith(first) if found and first else not found and first is None, found[:3]
    assert not [text for text in found if "output" in text]


@pytest.mark.drawn(1)
@pytest.mark.skipif(not MEGATRON.exists(), reason="needs Megatron Core: make install-test")
@pytest.mark.parametrize(
    ("bug", "first"),
    [
        ("", None),
        ("gathered_logits", "output of gpt, in forward of micro-batch 0, on rank 0 (off by 1.6e-01)"),
        ("label_smoothing", "output of smoothed_loss, in forward"),
        ("final_norm", "gradient of the parameter gpt.decoder.final_layernorm.weight"),
    ],
)
def test_megatron_core(bug: str, first: str | None, tmp_path: Path) -> None:
    found = differences(megatron_gpt.step, tmp_path, bug, str(MEGATRON))
    assert found[0].startswith(first) if found and first else not found and first is None, found[:3]
