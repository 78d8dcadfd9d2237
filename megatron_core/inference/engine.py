"""Continuous batching: requests join and leave the batch between two tokens (Yu et al. 2022, Orca)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError, ConfigError, LayoutError
from megatron_core.inference.generator import Generator, Message
from megatron_core.inference.kv_cache import CachedSpan, KVCache
from megatron_core.inference.requests import Progress, Request, TokenScore
from megatron_core.inference.sampling import Losses, fault_of, log_probabilities, sample_tokens
from megatron_core.inference.scheduler import BlockPool, RequestText, Segment, TextScheduler
from megatron_core.inference.settings import InferenceConfig
from megatron_core.monitor.device import total_memory_bytes
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD


@dataclass(frozen=True)
class _Flight:
    """A step that this rank has computed and whose result may be under way."""

    segments: Sequence[Segment]
    table: Tensor | None
    """A row for each row of logits; None if there are none."""
    messages: Sequence[Message]


class Engine:
    """Generates for all submitted requests, at most ``max_batch_size`` at a time; every rank calls the same methods.

    With pipeline stages, as many groups of requests as ranks of the pipeline are computed alternately, so that all
    stages work. Results do not depend on other requests.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        max_batch_size: int = 32,
        max_length: int | None = None,
        config: InferenceConfig | None = None,
        observe: Callable[[Sequence[Segment]], None] | None = None,
    ) -> None:
        """``observe`` is called with the segments of each step, in the order of their tokens, after the step was
        computed on this rank's stages."""
        for name, value, least in (("max_batch_size", max_batch_size, 1), ("max_length", max_length, 2)):
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: give {least} or more")
        config = config or InferenceConfig()
        self.generator = generator
        self.max_batch_size = max_batch_size
        limits = [limit for limit in (max_length, generator.learned_positions) if limit is not None]
        self.max_length = min(limits, default=None)
        """Maximum number of tokens of a prompt and its continuation; None: unlimited."""
        generator.scale_to(self.max_length)
        block_size = config.inference_dynamic_batching_block_size
        groups = generator.groups.size("pp")
        capacity = cache_blocks(config, generator, max_batch_size)
        self.scheduler = TextScheduler(
            BlockPool(capacity),
            block_size,
            groups=groups,
            max_batch_size=max_batch_size,
            max_tokens=config.inference_dynamic_batching_max_tokens,
            chunked=config.enable_chunked_prefill,
            # The states of recurrent layers are not kept for the ends of blocks.
            sharing=config.inference_dynamic_batching_prefix_caching and not generator.config.model.has_recurrence,
        )
        self.cache = KVCache(generator.device, block_size, capacity, max_batch_size)
        self._flights: list[_Flight | None] = [None] * groups
        self._turn = 0
        self._numbers = count()
        self._paused: dict[int, RequestText] = {}
        self._observe = observe

    @property
    def waiting(self) -> int:
        """Number of requests waiting to join the batch."""
        return len(self.scheduler.waiting)

    @property
    def running(self) -> int:
        """Number of requests in the batch."""
        return self.scheduler.running

    @property
    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self.running or self.waiting)

    @property
    def cache_positions(self) -> int:
        """Largest number of positions in the key-value cache."""
        return self.cache.capacity * self.cache.block_size

    def submit(self, request: Request, *, paused: bool = False, written: Sequence[int] = ()) -> int:
        """Queue a request, with ``max_new_tokens`` limited to the model's positions; return its number.

        A ``paused`` one is not computed before ``resume``. ``written``: the new tokens that it has already.
        ``ConfigError`` for a prompt that is empty, too long, or has tokens outside of the vocabulary, and for a request
        that does not fit the key-value cache even alone.
        """
        request = self.checked(request)
        number = next(self._numbers)
        random = torch.Generator().manual_seed(request.sampling.seed)
        if request.sampling.temperature > 0.0:
            for _ in written:
                torch.rand(1, dtype=torch.float64, generator=random)  # the number that ``draw`` has taken for it
        self._paused[number] = RequestText(number, request, random, [*request.prompt, *written], len(written))
        if not paused:
            self.resume(number)
        return number

    def checked(self, request: Request) -> Request:
        """Return the request with ``max_new_tokens`` limited, or raise ``ConfigError``."""
        length = len(request.prompt)
        limit = self.max_length
        if not length:
            raise ConfigError("the prompt has no token; give at least one character")
        if min(request.prompt) < 0 or max(request.prompt) >= self.generator.vocab_size:
            raise ConfigError(f"the prompt has tokens outside of the vocabulary, 0 to {self.generator.vocab_size - 1}")
        if request.score_prompt and request.logprobs is None:
            raise ConfigError("score_prompt needs logprobs; give 0 or more")
        if request.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={request.max_new_tokens} is negative; give 0 or more")
        if limit is not None and length + min(request.max_new_tokens, 1) > limit:
            raise ConfigError(
                f"the prompt's {length} tokens leave no room in the {limit} positions of this model; "
                "give a shorter prompt"
            )
        if limit is not None:
            request = replace(request, max_new_tokens=min(request.max_new_tokens, limit - length))
        # The last new token is not computed.
        needed = length + max(request.max_new_tokens - 1, 0)
        if needed > self.cache_positions:
            raise ConfigError(
                f"the prompt's {length} tokens and max_new_tokens={request.max_new_tokens} need {needed} positions of "
                f"the key-value cache, which has {self.cache_positions}; give a shorter prompt or fewer new tokens, or "
                "start with a larger --inference-dynamic-batching-buffer-size-gb"
            )
        return request

    def pause(self, number: int) -> None:
        """Stop computing a request that has no step under way, as after each of its tokens, until ``resume``."""
        text = self.scheduler.find(number)
        assert text is not None and text.remaining, f"request {number} has finished, or its next token is under way"
        # Its blocks return to the pool, which keeps full ones: a paused text must not take the memory of others.
        self._remove(text)
        self._paused[number] = text

    def resume(self, number: int) -> None:
        """Continue a paused request; positions that have left the cache are computed with the present weights."""
        self.scheduler.add(self._paused.pop(number))

    def free_cache(self) -> None:
        """Forget all keys and values, which a change of the weights makes wrong, and return their memory."""
        if self.busy:
            raise LayoutError(
                f"{self.running + self.waiting} requests are under way; finish, pause or cancel them before the cache "
                "is freed"
            )
        self.scheduler.pool.forget_unused()
        self.scheduler.compact()
        self.cache.free()

    def cancel(self, number: int) -> None:
        """Remove a request; a finished request is ignored."""
        self._paused.pop(number, None)
        text = self.scheduler.find(number)
        if text is not None:
            self._remove(text)

    def step(self) -> list[Progress]:
        """Compute a step of each group in turn, until one has a result; return the progress of its requests.

        While this rank waits for the result of a group, other stages compute steps of the others.
        """
        for _ in self._flights:
            self._flights[self._turn] = self._launch(self._turn)
            self._turn = (self._turn + 1) % len(self._flights)
            flight = self._flights[self._turn]
            self._flights[self._turn] = None
            if flight is not None:
                return self._land(flight)
        return []

    def _launch(self, slot: int) -> _Flight | None:
        """Compute the next step of a group on this rank's stages; on the last stage, choose the next tokens."""
        segments = self.scheduler.plan(slot)
        if not segments:
            return None
        self.cache.reserve(self.scheduler.pool.top)
        # Texts with the same first blocks are adjacent, so that attention reads these once.
        segments.sort(key=lambda segment: (segment.count > 1, segment.first == 0, segment.text.table))
        spans = [
            CachedSpan(segment.first, segment.count, segment.text.table, segment.text.state) for segment in segments
        ]
        ids = [token for s in segments for token in s.text.tokens[s.first : s.first + s.count]]
        ends = accumulate(segment.count for segment in segments)
        rows = [row for segment, end in zip(segments, ends, strict=True) for row in range(end - segment.rows, end)]
        # Without a text whose next token is chosen, the logits of any row serve to finish the model's forward.
        wanted = rows or [len(ids) - 1]
        logits, messages = self.generator.run(ids, spans, self.cache, None if len(wanted) == len(ids) else wanted)
        if self._observe is not None:
            self._observe(segments)
        if not rows:
            return _Flight(segments, None, messages)
        chosen = [segment for segment in segments if segment.rows]
        most = max((s.text.request.logprobs or 0 for s in chosen if s.text.request.logprobs is not None),
                   default=None)  # fmt: skip
        # For each row of logits: the next token, its log probability, the alternatives and their log probabilities.
        columns = 1 if most is None else 2 + 2 * most
        table = torch.zeros(len(rows), columns, dtype=torch.float64, device=self.generator.device)
        if logits is not None:
            _fill(table, logits, chosen, most, self.generator.losses)
        return _Flight(segments, table, [*messages, *self.generator.start_result(table)])

    def _land(self, flight: _Flight) -> list[Progress]:
        """Wait for a step's result, and record it."""
        for _, handle in flight.messages:
            handle.wait()
        values = iter([] if flight.table is None else flight.table.tolist())
        results = []
        for segment in flight.segments:
            numbers = list(islice(values, segment.rows))
            if segment.text.group is None or not numbers:  # cancelled in the meantime, or the middle of a prompt
                continue
            progress = _advance(segment, numbers)
            if progress is None:
                continue
            if progress.finished is not None:
                self._remove(segment.text, damaged=progress.error is not None)
            if progress.error is not None and segment.text.has_shared:
                # The text with which it shares may be the one that is not finite, after their common prefix: the
                # attention of earlier tokens in the same chunk multiplies weights of 0 by values that are not finite.
                segment.text.shares = False
                self.scheduler.add(segment.text)
            else:
                results.append(progress)
        return results

    def _remove(self, text: RequestText, *, damaged: bool = False) -> None:
        """Return a text's blocks; those of a ``damaged`` text may have numbers that are not finite."""
        pool = self.scheduler.pool
        blocks = text.table
        if damaged:
            pool.forget(blocks)
        self.scheduler.remove(text)
        if damaged:
            self.cache.clear([block for block in blocks if pool.is_unused(block)])
        if 2 * pool.held < self.cache.blocks:
            self.cache.keep(self.scheduler.compact())


def _fill(table: Tensor, logits: Tensor, segments: Sequence[Segment], most: int | None, losses: Losses | None) -> None:
    """Choose the next tokens of ``segments`` from their rows of logits, and score them and the tokens of prompts."""
    ends = list(accumulate(segment.rows for segment in segments))
    final = [end - 1 for end, segment in zip(ends, segments, strict=True) if segment.chooses]
    texts = [segment.text for segment in segments if segment.chooses]
    chosen = iter(
        sample_tokens(logits[final], [text.request.sampling for text in texts], [text.random for text in texts])
    )
    following: list[int] = []
    for segment in segments:
        start = segment.first + segment.count - segment.rows + 1
        following += segment.text.tokens[start : segment.first + segment.count + 1]
        following += [next(chosen)] if segment.chooses else []
    table[:, 0] = torch.tensor(following, dtype=torch.float64)
    if most is not None:
        tokens = torch.tensor(following, device=logits.device).clamp_(min=0)
        table[:, 1:] = log_probabilities(logits, tokens, most, losses)


def _advance(segment: Segment, values: list[list[float]]) -> Progress | None:
    """Record the scores of a prompt's tokens, and a chosen token as the next one of the text."""
    text = segment.text
    request = segment.text.request
    if text.is_scored:
        prompt = values[:-1] if segment.chooses else values
        text.prompt_scores += [_score(row, request.logprobs) for row in prompt]
    if not segment.chooses:
        return None
    token = int(values[-1][0])
    scores = () if text.written else tuple(text.prompt_scores)
    if token < 0:
        return Progress(text.number, None, finished="error", error=fault_of(token))
    if request.max_new_tokens == 0:
        return Progress(text.number, None, None, "length", scores)
    text.tokens.append(token)
    text.written += 1
    finished: Literal["stop", "length"] | None = "length" if text.written == request.max_new_tokens else None
    score = None if request.logprobs is None else _score(values[-1], request.logprobs)
    return Progress(text.number, token, score, "stop" if token in request.ends else finished, scores)


def _score(row: list[float], alternatives: int | None) -> TokenScore:
    most = (len(row) - 2) // 2
    pairs = zip(map(int, row[2 : 2 + most]), row[2 + most :], strict=True)
    return TokenScore(row[1], tuple(pairs)[: alternatives or 0])


def generate(generator: Generator, request: Request) -> Iterator[int]:
    """Yield the new tokens of one request, the same on every rank.

    Errors: ``CheckpointError`` if no next token can be chosen.
    """
    engine = Engine(generator, max_batch_size=1)
    engine.submit(request)
    while engine.busy:
        for progress in engine.step():
            if progress.error is not None:
                raise CheckpointError(progress.error)
            if progress.token is not None:
                yield progress.token


MEMINFO = Path("/proc/meminfo")
MOST_POSITIONS = 2**31
"""Upper bound for a model whose positions and memory are not limited."""


def cache_blocks(config: InferenceConfig, generator: Generator, texts: int) -> int:
    """Number of blocks for which every rank has memory in addition to the states of ``texts`` texts; a collective call.

    Errors: ``ConfigError`` if there is not memory for one block.
    """
    group = generator.groups.group(WORLD)
    device = generator.device
    size = config.inference_dynamic_batching_block_size * generator.bytes_per_position
    limit = config.inference_dynamic_batching_buffer_size_gb
    free = _free_bytes(device) / 2 / (1 if device.type == "cuda" else group.size())
    states = texts * generator.bytes_per_text
    memory = max(free - states, 0) if limit is None else limit * 1e9
    blocks = int(min(memory // max(size, 1), MOST_POSITIONS // config.inference_dynamic_batching_block_size))
    # The smallest number of all ranks.
    least = torch.tensor([-blocks], dtype=torch.int64, device=device)
    all_reduce_(least, group, maximum=True)
    if not least.item():
        if limit is None and free - states < size <= free:
            raise ConfigError(
                f"max_batch_size={texts}: states of {texts} texts need {states / 1e9:.3g} GB on rank "
                f"{group.rank()}, where {free / 1e9:.3g} GB hold them and the key-value cache; use a smaller "
                "--max-batch-size"
            )
        setting = "inference_dynamic_batching_buffer_size_gb"
        raise ConfigError(
            f"{setting}={limit} does not hold one block of {config.inference_dynamic_batching_block_size} positions, "
            f"{size / 1e9:.3g} GB on rank {group.rank()}; give more, or a smaller inference_dynamic_batching_block_size"
        )
    return -int(least.item())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return total_memory_bytes()
