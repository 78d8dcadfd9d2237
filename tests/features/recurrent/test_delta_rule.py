"""The gated delta rule in chunks against the recurrence token by token, in float64: outputs, states and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.features.recurrent.delta_rule import chunked_delta_rule, delta_rule_by_steps
from megatron_core.features.recurrent.recurrence import Transition

BATCH, LENGTH, HEADS, KEYS, VALUES = 2, 37, 3, 5, 4


def drawn(by_channel: bool = False) -> list[Tensor]:
    """Queries, keys of length 1, values, decays, rates, and a state."""
    torch.manual_seed(3)
    query, key = (torch.randn(BATCH, LENGTH, HEADS, KEYS, dtype=torch.float64) for _ in range(2))
    value, state = (torch.randn(*shape, dtype=torch.float64) for shape in ((BATCH, LENGTH, HEADS, VALUES),
                                                                           (BATCH, HEADS, KEYS, VALUES)))  # fmt: skip
    decay, rate = (torch.rand(BATCH, LENGTH, HEADS, dtype=torch.float64) for _ in range(2))
    if by_channel:
        decay = torch.rand(BATCH, LENGTH, HEADS, KEYS, dtype=torch.float64)
    key = key / key.norm(dim=-1, keepdim=True)
    return [x.requires_grad_() for x in (query, key, value, -4 * decay, rate, state)]


def borders() -> Tensor:
    """Tokens that begin documents: among them the first one, neighbours, and the first of a chunk of 8."""
    first = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    first[0, [0, 5, 6, 8, 30]] = True
    first[1, 36] = True
    return first


def compare(chunk: int, documents: bool, by_channel: bool = False, **settings: Any) -> None:
    *inputs, state = drawn(by_channel)
    first = borders() if documents else None
    expected = delta_rule_by_steps(*inputs, state=state, first=first)
    given = settings or {"state": state}
    if settings:
        given = {"state_after": lambda transition: settings["before"](transition, state)}
    found = chunked_delta_rule(*inputs, first=first, chunk=chunk, **given)
    gradients = []
    for output, last in (found, expected):
        gradients.append(torch.autograd.grad(output.cos().sum() + last.sin().sum(), [*inputs, state]))
    for mine, right in (*zip(found, expected, strict=True), *zip(*gradients, strict=True)):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_chunks_compute_the_recurrence(chunk: int, by_channel: bool, documents: bool) -> None:
    compare(chunk, documents, by_channel)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_state_that_depends_on_the_transition(by_channel: bool, documents: bool) -> None:
    """The transition of all tokens gives the last state, so that ranks can pass it on."""
    seen: list[Transition] = []

    def before(transition: Transition, state: Tensor) -> Tensor:
        seen.append(transition)
        return state

    compare(8, documents, by_channel, before=before)
    *inputs, state = drawn(by_channel)
    _, last = delta_rule_by_steps(*inputs, state=state, first=borders() if documents else None)
    torch.testing.assert_close(seen[0].factor @ state + seen[0].shift, last, rtol=1e-12, atol=1e-13)


def test_the_recurrence_is_the_equation() -> None:
    """Yang et al. 2025, equation 10, for one head: S_t = S_(t-1) a (I - b k k^T) + b v k^T, o = S q."""
    query, key, value, decay, rate, _ = (x.detach()[0] for x in drawn())
    state, outputs = torch.zeros(VALUES, KEYS, dtype=torch.float64), []
    for t in range(LENGTH):
        k, b = key[t, 1], rate[t, 1]
        state = state @ (decay[t, 1].exp() * (torch.eye(KEYS, dtype=torch.float64) - b * torch.outer(k, k)))
        state = state + b * torch.outer(value[t, 1], k)
        outputs.append(state @ query[t, 1])
    found, last = delta_rule_by_steps(*(x[None] for x in (query, key, value, decay, rate)))
    torch.testing.assert_close(found[0, :, 1], torch.stack(outputs), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(last[0, 1].mT, state, rtol=1e-12, atol=1e-13)


def test_a_decay_for_each_channel_is_the_equation() -> None:
    """Kimi Team 2025, equation 1, for one head: S_t = (I - b k k^T) diag(a) S_(t-1) + b k v^T, o = S^T q."""
    query, key, value, decay, rate, _ = (x.detach()[0] for x in drawn(by_channel=True))
    state, outputs = torch.zeros(KEYS, VALUES, dtype=torch.float64), []
    for t in range(LENGTH):
        k, b = key[t, 1], rate[t, 1]
        state = (torch.eye(KEYS, dtype=torch.float64) - b * torch.outer(k, k)) @ decay[t, 1].exp().diag() @ state
        state = state + b * torch.outer(k, value[t, 1])
        outputs.append(state.mT @ query[t, 1])
    found, last = delta_rule_by_steps(*(x[None] for x in (query, key, value, decay, rate)))
    torch.testing.assert_close(found[0, :, 1], torch.stack(outputs), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(last[0, 1], state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("by_channel", [False, True])
def test_strong_decays_stay_finite(by_channel: bool) -> None:
    """A decay of e^-3000 within a chunk, whose inverse no float64 holds."""
    query, key, value, decay, rate, state = (x.detach() for x in drawn(by_channel))
    found = chunked_delta_rule(query, key, value, 100 * decay, rate, state=state)
    torch.testing.assert_close(found, delta_rule_by_steps(query, key, value, 100 * decay, rate, state=state))
