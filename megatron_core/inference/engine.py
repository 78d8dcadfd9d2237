"""Continuous batching: requests join and leave the batch between two tokens (Yu et al. 2022, Orca)."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, islice
from typing import Literal

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.inference.generator import Generator
from megatron_core.inference.kv_cache import KVCache
from megatron_core.inference.sampling import Sampling, choose, log_probabilities


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
    finished: Literal["stop", "length"] | None = None
    """stop: ``token`` is one of ``ends``. length: it is the last requested token."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """Scores of the prompt's tokens after the first, in the first progress of a request with ``score_prompt``."""


@dataclass
class _Running:
    """A request in the batch."""

    number: int
    request: Request
    random: torch.Generator
    last: int = 0
    written: int = 0


class Engine:
    """Generates for all submitted requests, at most ``max_batch_size`` at a time; every rank calls the same methods.

    A step computes the prompts of joining requests, with at most ``max_prompt_tokens`` tokens unless a single prompt is
    longer, or otherwise one token for each request in the batch. Results do not depend on other requests in the batch.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        max_batch_size: int = 32,
        max_length: int | None = None,
        max_prompt_tokens: int = 4096,
    ) -> None:
        for name, value, least in (("max_batch_size", max_batch_size, 1), ("max_length", max_length, 2)):
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: give {least} or more")
        self.generator = generator
        self.max_batch_size, self.max_prompt_tokens = max_batch_size, max_prompt_tokens
        limits = [limit for limit in (max_length, generator.learned_positions) if limit is not None]
        self.max_length = min(limits, default=None)
        """Maximum number of tokens of a prompt and its continuation; None: unlimited."""
        self._waiting: deque[_Running] = deque()
        self._rows: list[_Running] = []
        self._cache = KVCache(generator.device)
        self._numbers = count()

    @property
    def waiting(self) -> int:
        """Number of requests waiting to join the batch."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests in the batch."""
        return len(self._rows)

    @property
    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self._rows or self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a request, with ``max_new_tokens`` limited to the model's positions; return its number.

        ``ConfigError`` for a prompt that is empty, too long, or has tokens outside of the vocabulary.
        """
        request = self.checked(request)
        number = next(self._numbers)
        random = torch.Generator().manual_seed(request.sampling.seed)
        self._waiting.append(_Running(number, request, random))
        return number

    def checked(self, request: Request) -> Request:
        """Return the request with ``max_new_tokens`` limited, or raise ``ConfigError``."""
        length, limit = len(request.prompt), self.max_length
        if not length:
            raise ConfigError("the prompt has no token; give at least one character")
        if min(request.prompt) < 0 or max(request.prompt) >= self.generator.vocab_size:
            raise ConfigError(f"the prompt has tokens outside of the vocabulary, 0 to {self.generator.vocab_size - 1}")
        if request.score_prompt and request.logprobs is None:
            raise ConfigError("score_prompt needs logprobs; give 0 or more")
        if request.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={request.max_new_tokens} is negative; give 0 or more")
        if limit is None:
            return request
        if length + min(request.max_new_tokens, 1) > limit:
            raise ConfigError(
                f"the prompt's {length} tokens leave no room in the {limit} positions of this model; "
                "give a shorter prompt"
            )
        return replace(request, max_new_tokens=min(request.max_new_tokens, limit - length))

    def cancel(self, number: int) -> None:
        """Remove a request; a finished request is ignored."""
        self._waiting = deque(each for each in self._waiting if each.number != number)
        for row, each in enumerate(self._rows):
            if each.number == number:
                self._remove(row)
                return

    def step(self) -> list[Progress]:
        """Advance the joining requests, or all requests in the batch; return their progress."""
        joining = self._joining()
        first, rows = (len(self._rows), joining) if joining else (0, self._rows)
        if not rows:
            return []
        self._rows = self._rows + joining
        whole = any(each.request.score_prompt for each in joining)
        if joining:
            prompts = [each.request.prompt for each in joining]
            logits = self.generator.start_sequences(prompts, self._cache, all_logits=whole)
        else:
            logits = self.generator.extend_sequences([each.last for each in rows], self._cache)
        found = self._progress(rows, logits, whole)
        for row, each in reversed(list(enumerate(found, first))):
            if each.finished is not None:
                self._remove(row)
        return found

    def _joining(self) -> list[_Running]:
        """Take the requests whose prompts are computed in this step from the queue."""
        found: list[_Running] = []
        tokens = 0
        while self._waiting and len(self._rows) + len(found) < self.max_batch_size:
            tokens += len(self._waiting[0].request.prompt)
            if found and tokens > self.max_prompt_tokens:
                break
            found.append(self._waiting.popleft())
        return found

    def _remove(self, row: int) -> None:
        self._cache.remove(row)
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def _progress(self, rows: list[_Running], logits: Tensor | None, whole: bool) -> list[Progress]:
        """Choose the next tokens on the last stage, and send them to the other ranks.

        ``logits`` has a row for each request, or if ``whole`` for each token of their prompts, request by request.
        """
        counts = [len(each.request.prompt) if whole else 1 for each in rows]
        most = max((each.request.logprobs for each in rows if each.request.logprobs is not None), default=None)
        # For each row of logits: the next token, its log probability, the alternatives and their log probabilities.
        columns = 1 if most is None else 2 + 2 * most
        table = torch.zeros(sum(counts), columns, dtype=torch.float64, device=self.generator.device)
        if logits is not None:
            ends = list(accumulate(counts))
            last = logits[[end - 1 for end in ends]] if whole else logits
            chosen = choose(last, [each.request.sampling for each in rows], [each.random for each in rows])
            following = chosen
            if whole:
                following = [
                    token for each, own in zip(rows, chosen, strict=True) for token in (*each.request.prompt[1:], own)
                ]
            table[:, 0] = torch.tensor(following, dtype=torch.float64)
            if most is not None:
                table[:, 1:] = log_probabilities(logits, torch.tensor(following, device=logits.device), most)
        values = iter(self.generator.share_result(table).tolist())
        return [self._advance(each, list(islice(values, length))) for each, length in zip(rows, counts, strict=True)]

    def _advance(self, each: _Running, values: list[list[float]]) -> Progress:
        """Record the last of ``values`` as the next token of a request."""
        request, token = each.request, int(values[-1][0])
        prompt = values[:-1] if request.score_prompt and not each.written else []
        scores = tuple(_score(row, request.logprobs) for row in prompt)
        if request.max_new_tokens == 0:
            return Progress(each.number, None, None, "length", scores)
        each.last = token
        each.written += 1
        finished: Literal["stop", "length"] | None = "length" if each.written == request.max_new_tokens else None
        score = None if request.logprobs is None else _score(values[-1], request.logprobs)
        return Progress(each.number, token, score, "stop" if token in request.ends else finished, scores)


def _score(row: list[float], alternatives: int | None) -> TokenScore:
    most = (len(row) - 2) // 2
    pairs = zip(map(int, row[2 : 2 + most]), row[2 + most :], strict=True)
    return TokenScore(row[1], tuple(pairs)[: alternatives or 0])


def generate(generator: Generator, request: Request) -> Iterator[int]:
    """Yield the new tokens of one request, the same on every rank."""
    engine = Engine(generator, max_batch_size=1)
    engine.submit(request)
    while engine.busy:
        yield from (each.token for each in engine.step() if each.token is not None)
