"""Communication and offloading are hidden behind computation, measured by the time in which a rank only waits.

Times are those of a simulated clock: each layer pauses in forward and in backward, and each update, and transfers
arrive over a simulated link (``SlowLink``). So the hidden part depends on the order of the calls alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.offloading import on_a_device, synchronous
from benchmarks.slow_link import SimulatedClock, SlowLink
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.reports.meter import METER
from megatron_core.training.step import train_step
from megatron_core.transformer.block import TransformerLayer
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted
from tests.runs import tiny_run

CLOCK = SimulatedClock()
PAUSE = 0.02
"""Seconds of a layer's forward, of its backward, and of the update of a part of the optimizer's state."""
SHARE = 0.6
"""Part of a transfer of one layer in the pause."""
MODEL = {"num_layers": 6, "micro_batch_size": 1, "global_batch_size": 2, "hidden_size": 32, "ddp_bucket_size": 10_000}
ZERO1 = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True}


class Pause(torch.autograd.Function):
    """The identity, which takes ``PAUSE`` in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CLOCK.sleep(PAUSE)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        CLOCK.sleep(PAUSE)
        return grad


@contextmanager
def slow_computation() -> Iterator[None]:
    """Make layers and updates slow."""
    forward, update = TransformerLayer.forward, Optimizer._update_part

    def slow_update(*args: Any) -> None:
        CLOCK.sleep(PAUSE)
        update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerLayer, "forward", lambda *args: Pause.apply(forward(*args)))
        patch.setattr(Optimizer, "_update_part", slow_update)
        yield


def hidden(settings: dict[str, Any], kinds: tuple[str, ...], context: Callable[[], Any], steps: int) -> Any:
    """The hidden part of the transfers of each kind, and losses and norms of the steps."""
    with ExitStack() as stack:
        stack.enter_context(context())
        run = tiny_run(**MODEL | settings)
        stack.enter_context(slow_computation())
        METER.start(run.groups, torch.device("cpu"))
        found = [train_step(run)]
        # The bandwidth: all transfers of a step take SHARE of the pauses of all layers in forward or in backward.
        traffic, links = METER.take().traffic, []
        for kind in kinds:
            sent = sum(one.bytes for name, one in traffic.items() if name.split()[1] == kind)
            links.append(SlowLink((kind,), sent / (SHARE * PAUSE * MODEL["num_layers"]), CLOCK))
            stack.enter_context(links[-1].installed())
        found += [train_step(run) for _ in range(steps)]
        METER.stop()
    parts = [1.0 - link.exposed / link.delayed for link in links]
    return parts, [(step.loss, step.grad_norm) for step in found]


def compare(
    off: dict[str, Any],
    on: dict[str, Any],
    kinds: tuple[str, ...],
    plain: Any = nullcontext,
    overlapped: Any = nullcontext,
) -> None:
    """About nothing is hidden without overlap, and at least 60 % with it; results are equal to the bit."""
    (without, expected), (with_overlap, found) = hidden(off, kinds, plain, 2), hidden(on, kinds, overlapped, 2)
    assert found == expected
    assert max(without) < 0.1, without
    assert min(with_overlap) >= 0.6, with_overlap


@pytest.mark.parametrize(
    ("base", "switch", "kinds"),
    [
        (ZERO1, OVERLAP, ("reduce_scatter",)),
        ({"zero_stage": 3}, OVERLAP, ("reduce_scatter",)),
        ({"zero_stage": 3}, {"overlap_param_gather": True, **OVERLAP}, ("all_gather",)),
    ],
    ids=["gradients", "gradients of zero 3", "gathers of zero 3"],
)
def test_collectives_are_hidden(base: dict[str, Any], switch: dict[str, Any], kinds: tuple[str, ...]) -> None:
    run_ranks(2, compare, base, base | switch, kinds)


@contextmanager
def synchronous_on_a_device() -> Iterator[None]:
    with on_a_device(), synchronous():
        yield


ACTIVATIONS = {"cpu_offloading": True, "cpu_offloading_num_layers": 5}
OPTIMIZER = {"optimizer_cpu_offload": True, "bf16": True}
COPIES = ("copy_out", "copy_in")


@pytest.mark.parametrize(
    "settings",
    [ACTIVATIONS, ZERO1 | OVERLAP | OPTIMIZER, {"zero_stage": 3} | OVERLAP | OPTIMIZER],
    ids=["activations", "optimizer", "optimizer, zero 3"],
)
def test_copies_to_host_memory_and_back_are_hidden(settings: dict[str, Any]) -> None:
    run_ranks(2, compare, settings, settings, COPIES, synchronous_on_a_device, on_a_device)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (ZERO1 | {"optimizer_offload_dir": "state"}, ("read", "write")),
        ({"zero_stage": 3, "zero3_param_offload_dir": "weights", "optimizer_offload_dir": "state"}, ("read",)),
    ],
    ids=["state", "state and weights"],
)
def test_the_disk_is_hidden(settings: dict[str, Any], kinds: tuple[str, ...], tmp_path: Path) -> None:
    folders = {name: str(tmp_path / value) if name.endswith("dir") else value for name, value in settings.items()}
    run_ranks(2, compare, folders, folders, kinds, synchronous)


def starts_in_backward(settings: dict[str, Any]) -> tuple[int, int]:
    """Number of gradients that leave before the last backward ends, and of all gradients that leave."""
    with on_a_device(), slow_computation():
        run = tiny_run(**MODEL | settings)
        METER.start(run.groups, torch.device("cpu"))
        METER.keep_spans = True
        train_step(run)
        METER.take()
    end = max(span.end for span in METER.spans if span.phase == "backward")
    starts = [flight.start for flight in METER.flights if flight.phase == "host copy_out"]
    return sum(start < end for start in starts), len(starts)


@pytest.mark.parametrize("settings", [{}, ZERO1, {"zero_stage": 2}], ids=["one rank", "zero 1", "zero 2"])
def test_gradients_leave_in_the_backward_pass(settings: dict[str, Any]) -> None:
    """All except the last bucket or unit, and on one rank all."""
    for early, count in run_ranks(
        2 if settings else 1, starts_in_backward, OPTIMIZER | settings | (OVERLAP if settings else {})
    ):
        assert count >= 6
        assert early >= count - 2 if settings else early == count


@pytest.mark.parametrize(
    ("place", "old", "new", "settings", "kind"),
    [
        (
            "features.offload.activations:ActivationOffload._begin_backward",
            "[unit.before]",
            "[unit]",
            ACTIVATIONS,
            "copy_in",
        ),
        (
            "features.offload.activations:_Saved.__init__",
            ".copy(self._host, self._here)",
            ".copy(self._host, self._here); self._transfer.wait()",
            ACTIVATIONS,
            "copy_out",
        ),
        (
            "features.offload.pipeline:UpdatePipeline.run",
            "None if following is None else _Loaded(following, self._sent, spare[(number + 1) % 3])",
            "None",
            ZERO1 | {"optimizer_offload_dir": "state"},
            "read",
        ),
        (
            "features.offload.pipeline:UpdatePipeline.run",
            "behind = loaded.store()",
            "_wait(loaded.store())",
            ZERO1 | OVERLAP | OPTIMIZER,
            "copy_in",
        ),
    ],
    ids=["wrong unit", "waits at once", "not ahead", "not behind"],
)
def test_finds_transfers_that_are_not_hidden(
    place: str, old: str, new: str, settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    folders = {name: str(tmp_path) if name.endswith("dir") else value for name, value in settings.items()}
    context = nullcontext if kind == "read" else on_a_device
    with planted(place, old, new):
        for (part,), _ in run_ranks(2, hidden, folders, (kind,), context, 2):
            assert part < 0.6
