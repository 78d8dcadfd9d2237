"""Requests to the engine and their results."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_core.inference.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the settings of its continuation."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    """Largest number of new tokens; 0 only scores the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    """Tokens that end the text."""
    logprobs: int | None = None
    """Report the log probability of each new token and of this number of most likely tokens; None: neither."""
    score_prompt: bool = False
    """Also report log probabilities of the prompt's tokens; requires ``logprobs``."""


@dataclass(frozen=True)
class TokenScore:
    """Log probability of a token, before temperature, and the most likely tokens with their log probabilities."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Progress:
    """Result of a step for one request."""

    number: int
    """Number of the request, as returned by ``submit``."""
    token: int | None
    """The new token; None for a request without new tokens."""
    score: TokenScore | None = None
    finished: Literal["stop", "length", "error"] | None = None
    """stop: ``token`` is one of ``ends``. length: it is the last requested token. error: see ``error``."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """Scores of the prompt's tokens after the first, in the first progress of a request with ``score_prompt``."""
    error: str | None = None
    """The reason for which no next token can be chosen; the request ends."""
