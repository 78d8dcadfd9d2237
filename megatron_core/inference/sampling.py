"""Sampling of the next token from its logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from megatron_core.errors import ConfigError

ORDERED = 1024
"""Number of most likely tokens that are sorted first; usually they suffice for ``top_p``."""
ROWS = 256
"""Rows of logits that are converted to float64 at a time; a whole prompt would take several GiB."""

Losses = Callable[[Tensor, Tensor], Tensor]
"""Function of logits ``[n, vocabulary]`` and tokens ``[n]`` that returns the loss of each row, ``[n]``."""
FAULTS = {-1: "nan", -2: "inf", -3: "-inf"}
"""Numbers in the place of a token, for largest logits that are not finite."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of sampling; by default the most likely token is chosen (greedy)."""

    temperature: float = 0.0
    """Divisor of the logits; 0 chooses the most likely token."""
    top_k: int = 0
    """Only the k most likely tokens are candidates; 0: all (Fan et al. 2018)."""
    top_p: float = 1.0
    """Only the most likely tokens with this total probability are candidates (Holtzman et al. 2020)."""
    seed: int = 1234
    """Seed for sampling."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} is not a finite number >= 0; give 0 (greedy) or more")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} is negative; give 0 (all tokens) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} is not a probability > 0; give more than 0 and at most 1")


def sample_tokens(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]) -> list[int]:
    """Choose a token for each row of ``logits`` ``[n, vocabulary]``; a sampled row uses its own generator.

    A row whose largest logit is not finite (NaN counts as the largest) gets a negative number, for ``fault_of``.
    """
    tokens = argmax(logits)
    largest = logits[torch.arange(len(logits)), tokens].tolist()
    for row, (sampling, generator) in enumerate(zip(samplings, generators, strict=True)):
        if not isfinite(largest[row]):
            tokens[row] = next(number for number, value in FAULTS.items() if str(largest[row]) == value)
        elif sampling.temperature > 0.0:
            tokens[row] = draw(candidate_logits(logits[row].cpu().to(torch.float32), sampling).softmax(-1), generator)
    return tokens


def fault_of(token: int) -> str:
    """The reason for which a row has the negative ``token``."""
    return (
        f"the largest logit of the next token is {FAULTS[token]}, so no token can be sampled; the weights are "
        "damaged, or overflow in their dtype: check the checkpoint, or convert it to a wider dtype"
    )


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """Draw an index from ``probabilities`` ``[n]``: the first with a cumulative sum >= a uniform number in (0, 1].

    For 49,152 tokens this takes 0.03 ms, torch.multinomial 1.2 ms.
    """
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    uniform = 1.0 - torch.rand(1, dtype=torch.float64, generator=generator)
    return int(torch.searchsorted(sums, uniform * sums[-1]))


def argmax(logits: Tensor) -> list[int]:
    """The index of the largest element in each row."""
    if logits.is_cpu:  # for 16 rows of 49,152, NumPy takes 0.1 ms and torch 1.1 ms
        logits = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
        return logits.numpy().argmax(-1).tolist()
    return logits.argmax(-1).tolist()


def candidate_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits divided by the temperature, with -inf for tokens that top_k and top_p exclude."""
    # Subtract the maximum first, in float64: division by a tiny temperature would give infinity, and then NaN.
    logits = ((logits - logits.max()).to(torch.float64) / sampling.temperature).to(torch.float32)
    if 0 < sampling.top_k < logits.shape[-1]:
        weakest = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    if sampling.top_p < 1.0:
        probabilities = logits.softmax(-1)
        # Usually few tokens suffice: of 49,152 tokens the first 1024 take 0.5 ms, sorting all takes 3.4 ms.
        ordered, index = probabilities.topk(min(ORDERED, len(logits)))
        if len(index) < len(logits) and ordered.sum() < sampling.top_p:
            ordered, index = probabilities.sort(descending=True)
        # Keep a token if all more likely tokens together have less than top_p; this always keeps the first.
        allowed = index[ordered.cumsum(-1) - ordered < sampling.top_p]
        logits = torch.full_like(logits, -torch.inf).index_copy_(0, allowed, logits[allowed])
    return logits


def log_probabilities(logits: Tensor, tokens: Tensor, most: int, losses: Losses | None = None) -> Tensor:
    """Log probabilities of ``tokens`` ``[n]`` from logits ``[n, vocabulary]``, and the ``most`` most likely tokens.

    ``losses``: the loss of training, whose negative is the log probability; None: log softmax in float64.
    Returns ``[n, 1 + 2 most]`` in float64: log probability of the token, most likely tokens, their log probabilities.
    """
    pairs = zip(logits.split(ROWS), tokens.split(ROWS), strict=True)
    return torch.cat([_log_probabilities(rows, tokens_of_rows, most, losses) for rows, tokens_of_rows in pairs])


def _log_probabilities(logits: Tensor, tokens: Tensor, most: int, losses: Losses | None) -> Tensor:
    count = min(most, logits.shape[-1])
    if losses is None:
        scores = logits.to(torch.float64).log_softmax(-1)
        top = scores.topk(count)
        chosen = scores.gather(-1, tokens[:, None])
        values = top.values
        indices = top.indices
    else:
        indices = logits.topk(count).indices
        columns = [-losses(logits, targets).to(torch.float64) for targets in (tokens, *indices.unbind(-1))]
        chosen = columns[0][:, None]
        values = torch.stack(columns, dim=-1)[:, 1:]
    padding = values.new_full((len(values), most - count), -torch.inf)
    return torch.cat([chosen, indices.to(values), torch.zeros_like(padding), values, padding], dim=-1)
