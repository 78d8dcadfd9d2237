"""Requests to the sampler, and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from megatron_core.inference.requests import Progress, Request, TokenScore
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.text import TextStream


@dataclass(frozen=True, kw_only=True)
class RolloutRequest(Request):
    """A prompt with settings of its own: ``max_new_tokens``, ``sampling``, ``ends`` and the fields below."""

    stop_strings: tuple[str, ...] = ()
    """Strings that end the answer, which keeps the tokens with the string; they need the trainer's tokenizer."""
    group: int | None = None
    """Requests of a group are sampled by the same replica, which computes their common prefix once; by default each
    request is a group."""


@dataclass(frozen=True)
class Answer:
    """A sampled continuation of a prompt."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-probability of each token at temperature 1, when it was sampled."""
    finished: str
    """``stop``: the last token is one of ``ends``, or a stop string ends the answer; ``length``: the answer has
    ``max_new_tokens``; ``aborted``: by ``RolloutSampler.abort``; ``error``: see ``error``."""
    versions: tuple[int, ...]
    """For each token, the version of the weights that sampled it: the number of updates of the sampler before it."""
    experts: np.ndarray | None = None
    """``[n, layers, k]``, the experts of all tokens but the last one in each layer with experts, if they are recorded:
    bytes, or 16-bit numbers for more than 256 experts."""
    error: str = ""
    """Why no token could be chosen; only ``RolloutSampler.sample_each`` returns such an answer."""
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token, the ``Request.logprobs`` most likely tokens and their log-probabilities."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """Scores of the prompt's tokens after the first one, for ``Request.score_prompt``."""


@dataclass
class UnfinishedAnswer:
    """An answer that this replica samples."""

    request: Request
    text: TextStream | None
    """The text in which stop strings are looked for."""
    engine_number: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[Sequence[Any]] = field(default_factory=list)
    prompt_scores: Sequence[TokenScore] = ()
    finished: str | None = None
    error: str = ""

    def add(self, progress: Progress, version: int) -> bool:
        """Add a token; return whether a stop string ends the answer before the engine does."""
        self.error = progress.error or ""
        self.finished = progress.finished
        self.prompt_scores = progress.prompt_scores or self.prompt_scores
        if progress.token is None or progress.score is None:
            return False
        self.tokens.append(progress.token)
        self.log_probs.append(progress.score.logprob)
        self.alternatives.append(progress.score.alternatives)
        self.versions.append(version)
        if self.text is None:
            return False
        self.text.add(progress.token)
        if not self.text.stopped:
            return False
        ends_early = self.finished is None
        self.finished = "stop"
        return ends_early

    def row(self, number: int) -> list[Any]:
        """The answer with its number, as JSON for the other ranks."""
        scores = [[score.logprob, score.alternatives] for score in self.prompt_scores]
        alternatives = self.alternatives if any(self.alternatives) else []
        fields = self.tokens, self.log_probs, self.finished, self.versions, self.error, alternatives, scores
        return [number, *fields]


def request_fields(request: Request) -> dict[str, Any]:
    """A request as JSON."""
    return {**asdict(request), "ends": sorted(request.ends)}


def request_of(fields: Mapping[str, Any]) -> RolloutRequest:
    """The request of ``request_fields``."""
    strings = tuple(fields.get("stop_strings", ()))
    sets = {"ends": frozenset(fields["ends"]), "stop_strings": strings, "sampling": Sampling(**fields["sampling"])}
    return RolloutRequest(**{**fields, **sets, "prompt": tuple(fields["prompt"])})


def answer_of(row: Sequence[Any], experts: np.ndarray | None) -> Answer:
    """The answer of a row of ``UnfinishedAnswer.row``."""
    _, tokens, log_probs, finished, versions, error, alternatives, scores = row
    return Answer(
        tuple(tokens),
        tuple(log_probs),
        finished,
        tuple(versions),
        experts,
        error,
        tuple(map(_pairs, alternatives)),
        tuple(TokenScore(log_prob, _pairs(likely)) for log_prob, likely in scores),
    )


def _pairs(alternatives: Sequence[Any]) -> tuple[tuple[int, float], ...]:
    return tuple((token, log_prob) for token, log_prob in alternatives)


class SampledTokens(Protocol):
    """An ``Answer`` or an ``Episode``."""

    @property
    def log_probs(self) -> tuple[float, ...]:
        """See ``Answer``."""

    @property
    def versions(self) -> tuple[int, ...]:
        """See ``Answer``."""


def largest_difference(
    answers: Sequence[SampledTokens], log_probs: Sequence[torch.Tensor], *, version: int | None = None
) -> float:
    """The largest difference between log-probabilities of the sampler and of the trainer, over the tokens of all
    answers or episodes, or over those of ``version``; 0.0 if they have the same bits."""
    largest = 0.0
    for answer, trained in zip(answers, log_probs, strict=True):
        counted = torch.tensor([version in (None, of_token) for of_token in answer.versions], dtype=torch.bool)
        differences = (torch.tensor(answer.log_probs, dtype=torch.float64) - trained.double().cpu()).abs()
        if counted.any():
            # ``maximum`` keeps NaN, which ``max`` of Python's numbers may lose.
            largest = float(torch.maximum(differences[counted].max(), torch.tensor(largest, dtype=torch.float64)))
    return largest
