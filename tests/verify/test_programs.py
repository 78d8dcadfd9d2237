"""Other libraries' programs: a step on several ranks is compared with the step on one, and public bugs are located."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.first_difference import fsdp2, megatron_gpt
from megatron_core.errors import DataError
from megatron_core.verify import compare, run_ranks
from megatron_core.verify.parts import Block, parts_of, sliced
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

MEGATRON = os.environ.get("MEGATRON_CORE", "")
"""Folder with Megatron Core, see docs/compare_programs.md."""


def differences(program: Callable[..., list[str]], folder: Path, *arguments: object) -> list[str]:
    """Run a program on one rank and on two; return the differences."""
    torch.set_num_threads(1)
    assert run_ranks(1, program, str(folder), *arguments, backend="gloo") == [[]]
    return run_ranks(2, program, str(folder), *arguments, backend="gloo")[0]


# --- Parts of a tensor


def test_parts_by_every_axis() -> None:
    whole = np.arange(8 * 6.0).reshape(8, 6)
    axes = {"tp": (1, 2), "cp": (0, 2)}
    rows = [part[:, 0].tolist() for part in parts_of(whole, (4, 6), axes)]
    assert [24.0, 30.0, 36.0, 42.0] in rows  # the second half, of tp
    assert [0.0, 6.0, 36.0, 42.0] in rows  # the first and the last quarter, of causal context parallelism
    assert [12.0, 18.0, 36.0, 42.0] in rows  # the second halves of two joined matrices
    both = [part.tolist() for part in parts_of(whole, (4, 3), axes)]
    assert whole[:4, 3:].tolist() in both  # cp splits rows, tp columns
    assert not list(parts_of(whole, (3, 6), axes))
    assert [part.shape for part in parts_of(whole, (8, 6), axes)] == [(8, 6)]


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


# --- Public bugs of others


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


@pytest.mark.skipif(not MEGATRON, reason="needs Megatron Core in the folder MEGATRON_CORE")
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
    found = differences(megatron_gpt.step, tmp_path, bug, MEGATRON)
    assert found[0].startswith(first) if found and first else not found and first is None, found[:3]
