"""The gated delta rule: a recurrence over tokens, and the same function in chunks of tokens.

    S_t = e^(g_t) S_(t-1) + k_t (b_t (v_t - k_t^T e^(g_t) S_(t-1)))^T        o_t = S_t^T q_t

S is the state ``[dk, dv]`` of a head, g <= 0 the logarithm of its decay, one number or one for each key channel, and b
the rate of the update. ``first`` marks tokens that start from a state of 0. Source: Yang, Kautz and Hatamizadeh 2025
(arXiv 2412.06464), equation 10 and section 3.3; with a decay for each channel Kimi Team 2025 (arXiv 2510.26692),
equation 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_core.features.recurrent.recurrence import CHUNK, Transition, decays_in_chunks, split_in_chunks

CHANNEL_CHUNK = 16
"""Tokens of a chunk if every channel has a decay, whose products of tokens are not matrix products."""

NORM_EPSILON = 1e-6
"""Added to the squared norms of queries and keys (Qwen3-Next, flash-linear-attention)."""


def unit_heads(x: Tensor, channels: int, shared: int) -> Tensor:
    """Queries or keys ``[..., groups * dk]`` of length 1, ``[..., groups * shared, dk]``; heads of a group share them.

    ``channels`` is dk.
    """
    x = x.unflatten(-1, (-1, channels))
    x = x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
    return x.repeat_interleave(shared, dim=-2)


def delta_rule_by_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    state: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token: the reference, and the step of generation.

    Args:
        query, key: ``[b, s, heads, dk]``.
        value: ``[b, s, heads, dv]``.
        decay: ``[b, s, heads]``, or ``[b, s, heads, dk]`` with a decay for each channel; g of the equation.
        rate: ``[b, s, heads]``, b of the equation.
        state: ``[b, heads, dk, dv]``, the state before the first token; None: 0.
        first: ``[b, s]``, True for tokens that start from a state of 0.

    Returns:
        The outputs ``[b, s, heads, dv]``, and the state after the last token.
    """
    if state is None:
        state = value.new_zeros(*value.shape[::2], key.shape[-1], value.shape[-1])
    outputs = []
    decay = decay.unsqueeze(-1) if decay.dim() == 3 else decay
    for t in range(query.shape[1]):
        state = decay[:, t].exp().unsqueeze(-1) * state
        if first is not None:
            state = state.masked_fill(first[:, t, None, None, None], 0.0)
        stored = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        update = rate[:, t, :, None] * (value[:, t] - stored)
        state = state + key[:, t, :, :, None] * update[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outputs, dim=1), state


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    state: Tensor | None = None,
    first: Tensor | None = None,
    state_after: Callable[[Transition], Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``delta_rule_by_steps`` with matrix products over chunks of ``chunk`` tokens, for training.

    Within a chunk, the updates of all tokens follow from a triangular system; only states are passed from one chunk to
    the next. ``state_after`` returns the state before the first token from the transition of all tokens, for sequences
    that are split over ranks; it replaces ``state``.
    """
    length = query.shape[1]
    by_channel = decay.dim() == 4
    chunk = min(chunk or (CHANNEL_CHUNK if by_channel else CHUNK), length)
    query, key, value = (split_in_chunks(x, chunk) for x in (query, key, value))  # [b, heads, chunks, chunk, d]
    decay, rate = (split_in_chunks(x if x.dim() == 4 else x.unsqueeze(-1), chunk) for x in (decay, rate))
    between, start, end = decays_in_chunks(decay, first)
    near = (key.unsqueeze(-3) * between).contiguous() if by_channel else None  # keys as each token sees them

    def decayed(x: Tensor) -> Tensor:
        """Products of ``x`` and the keys, each decayed between the two tokens."""
        if near is None:
            return x @ key.mT * between.squeeze(-1)
        return (near @ x.unsqueeze(-1)).squeeze(-1)

    # Updates of a chunk's tokens: ``own`` - ``read`` S for the state S before the chunk.
    weighted = key * rate
    system = decayed(weighted).tril(-1)
    sides = torch.cat([value * rate, weighted * start], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)

    # States before the chunks, one after another.
    late = key * end
    carried = start[..., -1, :, None]
    if state_after is None:
        if state is None:
            state = value.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
        states, final = _states(state, written, read, late, carried)
    else:
        states, final = _states_after(state_after, written, read, late, carried)
    outputs = (query * start) @ states + decayed(query) @ (written - read @ states)
    return outputs.flatten(2, 3)[:, :, :length].transpose(1, 2), final


def _states(state: Tensor, written: Tensor, read: Tensor, late: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before the chunks, ``[b, heads, chunks, dk, dv]``, and the state after the last one."""
    states = []
    for n in range(written.shape[2]):
        states.append(state)
        update = written[:, :, n] - read[:, :, n] @ state
        state = carried[:, :, n] * state + late[:, :, n].mT @ update
    return torch.stack(states, dim=2), state


def _states_after(
    state_after: Callable[[Transition], Tensor], written: Tensor, read: Tensor, late: Tensor, carried: Tensor
) -> tuple[Tensor, Tensor]:
    """As ``_states``, for a first state that depends on the transition of all chunks.

    The columns of the identity and of 0, as states before the first chunk, give factor and shift of every chunk.
    """
    keys = read.shape[-1]
    values = written.shape[-1]
    identity = torch.eye(keys, dtype=written.dtype, device=written.device).expand(*written.shape[:2], -1, -1)
    columns = torch.cat([identity, written.new_zeros(*written.shape[:2], keys, values)], dim=-1)
    of_columns = torch.nn.functional.pad(written, (keys, 0))
    transitions, composed = _states(columns, of_columns, read, late, carried)
    state = state_after(Transition(*composed.split([keys, values], dim=-1)))
    factors, shifts = transitions.split([keys, values], dim=-1)
    return factors @ state.unsqueeze(2) + shifts, composed[..., :keys] @ state + composed[..., keys:]
