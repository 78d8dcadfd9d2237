"""Two functions that run together, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_core.features.paired_passes.interleave import hand_over, interleave
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.reports.meter import METER

CPU = torch.device("cpu")


def steps(name: str, count: int, log: list[str]) -> Callable[[], str]:
    """A function that hands over after each of its steps but the last."""

    def run() -> str:
        for number in range(count):
            if number:
                hand_over()
            log.append(f"{name}{number}")
        return name

    return run


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [(3, 3, "b0 a0 b1 a1 b2 a2"), (3, 1, "b0 a0 a1 a2"), (2, 4, "b0 a0 b1 a1 b2 b3")],
)
def test_functions_alternate_until_one_ends(first: int, second: int, order: str) -> None:
    for _ in range(20):
        log: list[str] = []
        with ThreadPoolExecutor(1) as pool:
            assert interleave(pool, CPU, steps("a", first, log), steps("b", second, log)) == ("a", "b")
        assert " ".join(log) == order
    hand_over()  # without a pair it returns


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_ends_both(failing: int) -> None:
    def fails() -> None:
        hand_over()
        raise ValueError("of this function")

    log: list[str] = []
    functions = [steps("a", 9, log), steps("a", 9, log)]
    functions[failing] = fails
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="of this function"):
        interleave(pool, CPU, *functions)
    assert len(log) <= 2, "the other function is abandoned where it waits"
    with ThreadPoolExecutor(1) as pool:  # the next pair is not disturbed
        assert interleave(pool, CPU, steps("a", 2, log), steps("b", 2, log)) == ("a", "b")


def test_an_error_in_a_backward_ends_its_forward() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            hand_over()
            raise RuntimeError("in the backward")

    loss = Fails.apply(torch.ones(2, requires_grad=True)).sum()
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="in the backward"):
        interleave(pool, CPU, steps("a", 9, []), loss.backward)


def test_each_function_has_its_phase_and_gradient_mode() -> None:
    found: dict[str, list[object]] = {}

    def run(name: str, grad: bool) -> Callable[[], None]:
        def function() -> None:
            METER.switch(name, name)
            with torch.set_grad_enabled(grad):
                for _ in range(3):
                    hand_over()
                    found.setdefault(name, []).append((METER.charged, torch.is_grad_enabled()))

        return function

    METER.start(ParallelGroups.single(), CPU)
    with ThreadPoolExecutor(1) as pool:
        interleave(pool, CPU, run("forward", True), run("backward", False))
    METER.stop()
    assert found == {
        "forward": [(("forward", "forward"), True)] * 3,
        "backward": [(("backward", "backward"), False)] * 3,
    }
