"""State spaces in chunks against the recurrence token by token, in float64: outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.features.recurrent.recurrence import Transition
from megatron_core.features.recurrent.state_space import chunked_state_space, state_space_by_steps
from tests.features.recurrent.test_delta_rule import borders

BATCH, LENGTH, GROUPS, HEADS, KEYS, VALUES = 2, 37, 2, 6, 5, 4


def drawn() -> list[Tensor]:
    """Queries, keys, values, decays and a state."""
    torch.manual_seed(3)
    query, key = (torch.randn(BATCH, LENGTH, GROUPS, KEYS, dtype=torch.float64) for _ in range(2))
    value = torch.randn(BATCH, LENGTH, HEADS, VALUES, dtype=torch.float64)
    decay = -4 * torch.rand(BATCH, LENGTH, HEADS, dtype=torch.float64)
    state = torch.randn(BATCH, HEADS, KEYS, VALUES, dtype=torch.float64)
    return [x.requires_grad_() for x in (query, key, value, decay, state)]


def compare(chunk: int, first: Tensor | None, seen: list[Transition] | None = None) -> None:
    """``seen``: give the first state as a function of the transition, which is appended."""
    *inputs, state = drawn()

    def before(transition: Transition) -> Tensor:
        assert seen is not None
        seen.append(transition)
        return state

    given = {"state": state} if seen is None else {"state_after": before}
    expected = state_space_by_steps(*inputs, state=state, first=first)
    found = chunked_state_space(*inputs, first=first, chunk=chunk, **given)
    gradients = []
    for output, last in (found, expected):
        gradients.append(torch.autograd.grad(output.cos().sum() + last.sin().sum(), [*inputs, state]))
    for mine, right in (*zip(found, expected, strict=True), *zip(*gradients, strict=True)):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_chunks_compute_the_recurrence(chunk: int, documents: bool) -> None:
    compare(chunk, borders() if documents else None)


@pytest.mark.parametrize("documents", [False, True])
def test_a_state_that_depends_on_the_transition(documents: bool) -> None:
    """The transition of all tokens gives the last state, so that ranks can pass it on."""
    seen: list[Transition] = []
    first = borders() if documents else None
    compare(8, first, seen)
    *inputs, state = drawn()
    _, last = state_space_by_steps(*inputs, state=state, first=first)
    torch.testing.assert_close(seen[0].apply(state), last, rtol=1e-12, atol=1e-13)


def test_the_recurrence_is_the_equation() -> None:
    """Dao and Gu 2024, equation 2, for one head: y = M x with M_ji = C_j^T A_j ... A_(i+1) B_i."""
    query, key, value, decay, _ = (x.detach()[0] for x in drawn())
    total = decay[:, 4].cumsum(0)
    weights = (query[:, 1] @ key[:, 1].T * (total[:, None] - total).exp()).tril()
    found, _ = state_space_by_steps(*(x[None] for x in (query, key, value, decay)))
    torch.testing.assert_close(found[0, :, 4], weights @ value[:, 4], rtol=1e-9, atol=1e-10)


def test_strong_decays_stay_finite() -> None:
    """A decay of e^-3000 within a chunk, whose inverse no float64 holds."""
    query, key, value, decay, state = (x.detach() for x in drawn())
    found = chunked_state_space(query, key, value, 100 * decay, state=state)
    torch.testing.assert_close(found, state_space_by_steps(query, key, value, 100 * decay, state=state))
