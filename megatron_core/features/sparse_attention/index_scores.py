"""Scores of an indexer, the keys that it selects, and its loss (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1)."""

import torch
from torch import Tensor

from megatron_core.ops.rows import wide


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """I_st = 1 / sqrt(H d) sum over heads h of w_sh relu(q_sh k_t), at least in float32.

    Queries ``[s, b, H, d]``, keys ``[t, b, d]``, weights of the heads ``[s, b, H]`` -> ``[b, s, t]``. DeepSeek's code
    has the factor, which the paper's equation 1 leaves to the weights.
    """
    dtype = wide(query.dtype)
    factor = (query.shape[2] * query.shape[3]) ** -0.5
    products = torch.einsum("sbhd,tbd->bsht", query.to(dtype), key.to(dtype)).relu()
    return torch.einsum("bsht,sbh->bst", products, weights.to(dtype)) * factor


def select_keys(scores: Tensor, hidden: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` largest visible scores of each query, int64 ``[b, s, k]``.

    ``scores`` ``[b, s, t]``; ``hidden`` broadcasts to it, True for a key that the query must not see. k is the smaller
    of ``count`` and t. Of equal scores, such as the zeros of ``relu``, the key at the lower position is selected, so
    that the choice is a function of the scores alone. A query that sees fewer keys than k also gets hidden ones.
    """
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count]


def not_selected(positions: Tensor, keys: int) -> Tensor:
    """``[b, s, keys]``, False at ``positions`` ``[b, s, k]`` and True elsewhere."""
    everything = torch.ones(*positions.shape[:-1], keys, dtype=torch.bool, device=positions.device)
    return everything.scatter_(-1, positions, False)


def index_divergence(target: Tensor, scores: Tensor, hidden: Tensor) -> Tensor:
    """KL(p || softmax(I)) of each query over its visible keys, ``[b, s]`` (equations 3 and 4).

    ``target`` p and ``scores`` I are ``[b, s, t]``; ``hidden`` broadcasts to them. p is 0 for hidden keys.
    """
    log_probs = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.special.xlogy(target, target) - target * log_probs).sum(-1)
