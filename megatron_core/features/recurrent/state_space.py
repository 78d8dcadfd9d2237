"""State space duality: a recurrence over tokens with a number as decay, and the same function in chunks of tokens.

    S_t = e^(g_t) S_(t-1) + k_t v_t^T        o_t = S_t^T q_t

S is the state ``[dk, dv]`` of a head, and g <= 0 the logarithm of its decay. In the terms of Mamba-2, q is C, k is B, v
is x times the step dt, and g is dt A. Several adjacent heads share q and k. ``first`` marks tokens that start from a
state of 0. Source: Dao and Gu 2024 (arXiv 2405.21060), equation 1 and section 6.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_core.features.recurrent.recurrence import CHUNK, Transition, decays_in_chunks, split_in_chunks


def state_space_by_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    *,
    state: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token: the reference, and the step of generation.

    Args:
        query, key: ``[b, s, groups, dk]``.
        value: ``[b, s, heads, dv]``.
        decay: ``[b, s, heads]``, g of the equation.
        state: ``[b, heads, dk, dv]``, the state before the first token; None: 0.
        first: ``[b, s]``, True for tokens that start from a state of 0.

    Returns:
        The outputs ``[b, s, heads, dv]``, and the state after the last token.
    """
    if state is None:
        state = value.new_zeros(*value.shape[::2], key.shape[-1], value.shape[-1])
    query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], dim=2) for x in (query, key))
    outputs = []
    for t in range(value.shape[1]):
        state = decay[:, t, :, None, None].exp() * state
        if first is not None:
            state = state.masked_fill(first[:, t, None, None, None], 0.0)
        state = state + key[:, t, :, :, None] * value[:, t, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outputs, dim=1), state


def chunked_state_space(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    *,
    state: Tensor | None = None,
    first: Tensor | None = None,
    state_after: Callable[[Transition], Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``state_space_by_steps`` with matrix products over chunks of ``chunk`` tokens, for training.

    Within a chunk, the outputs are those of attention whose weights decay; only states are passed from one chunk to the
    next. ``state_after`` returns the state before the first token from the transition of all tokens, for sequences that
    are split over ranks; it replaces ``state``.
    """
    length = value.shape[1]
    groups = key.shape[2]
    chunk = min(chunk or CHUNK, length)
    # [b, groups, chunks, chunk, dk]
    query = split_in_chunks(query, chunk)
    key = split_in_chunks(key, chunk)
    decays = decays_in_chunks(split_in_chunks(decay.unsqueeze(-1), chunk), first)
    # Here and below g is a group, s a head of the group, c a chunk, i a token of it, k and v are channels.
    value, between, start, end = (x.unflatten(1, (groups, -1)) for x in (split_in_chunks(value, chunk), *decays))
    added = torch.einsum("bgcik,bgsciv->bgsckv", key, value * end).flatten(1, 2)
    states, final = _states(added, start[..., -1:, :].flatten(1, 2), state, state_after)
    earlier = torch.einsum("bgcik,bgsckv->bgsciv", query, states.unflatten(1, (groups, -1))) * start
    outputs = earlier + ((query @ key.mT).unsqueeze(2) * between.squeeze(-1)) @ value
    return outputs.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2), final


def _states(
    added: Tensor, carried: Tensor, state: Tensor | None, state_after: Callable[[Transition], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the states before the chunks, ``[b, heads, chunks, dk, dv]``, and the state after the last one.

    ``added`` is what the tokens of each chunk add to the state at its end, ``carried`` ``[b, heads, chunks, 1, 1]`` the
    factor of the state before the chunk.
    """
    if state_after is None:
        state = torch.zeros_like(added[:, :, 0]) if state is None else state
        transitions = _transitions(added, carried, state)
        return torch.stack([t.shift for t in transitions[:-1]], dim=2), transitions[-1].shift
    transitions = _transitions(added, carried, torch.zeros_like(added[:, :, 0]))
    state = state_after(transitions[-1])
    return torch.stack([t.apply(state) for t in transitions[:-1]], dim=2), transitions[-1].apply(state)


def _transitions(added: Tensor, carried: Tensor, state: Tensor) -> list[Transition]:
    """The transitions from before the first chunk to before each chunk, and after the last one; they add ``state``."""
    transitions = [Transition(torch.ones_like(carried[:, :, 0]), state)]
    for n in range(added.shape[2]):
        factor, shift = transitions[-1]
        transitions.append(Transition(carried[:, :, n] * factor, carried[:, :, n] * shift + added[:, :, n]))
    return transitions
