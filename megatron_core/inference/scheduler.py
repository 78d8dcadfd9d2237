"""Choice of the tokens of a step: one of each running text, and chunks of long prompts."""

from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush

import torch

from megatron_core.errors import LayoutError
from megatron_core.inference.requests import Request, TokenScore

UNUSED_SHARE = 4
"""At most one block in this number is kept without a text that uses it, so that an idle server returns memory."""


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block's ``tokens`` and of all tokens before them, whose hash is ``parent`` (b"" for none)."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


class BlockPool:
    """Numbers of up to ``capacity`` blocks; numbers in use are as low as possible, so that memory can shrink.

    A full block may be registered with the hash of its content (``block_key``); texts with the same prefix then share
    it, and a registered block without a text is kept until its memory is needed, the least recently used first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.top = 0
        """Blocks with a number below this one have been used since the last ``compact``."""
        self._free: list[int] = []
        self._references: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated."""
        return self.capacity - len(self._references)

    @property
    def held(self) -> int:
        """Number of blocks with content: those of texts, and unused ones that are kept."""
        return len(self._references) + len(self._unused)

    @property
    def unused(self) -> int:
        """Number of blocks without a text that are kept for texts with the same prefix."""
        return len(self._unused)

    def find(self, key: bytes) -> int | None:
        """Return the block registered with ``key``."""
        return self._by_key.get(key)

    def is_unused(self, block: int) -> bool:
        """Whether no text uses ``block``."""
        return block not in self._references

    def allocate(self) -> int:
        """Return a block for a single text; LayoutError if none is available."""
        if self._free:
            block = heappop(self._free)
        elif self.top < self.capacity:
            block = self.top
            self.top = self.top + 1
        elif self._unused:
            self._evict()
            block = heappop(self._free)
        else:
            raise LayoutError(f"all {self.capacity} blocks of the key-value cache are in use")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more text that uses ``block``."""
        self._references[block] = self._references.get(block, 0) + 1
        self._unused.pop(block, None)

    def register(self, block: int, key: bytes) -> None:
        """Offer a full block to texts with the same prefix, unless another block has the same content."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key

    def release(self, blocks: Iterable[int]) -> None:
        """Count one text fewer for each block; the last blocks of a text become free before the first ones."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            if block in self._keys:
                self._unused[block] = None
            else:
                heappush(self._free, block)
        while len(self._unused) > self.capacity // UNUSED_SHARE:
            self._evict()

    def forget(self, blocks: Iterable[int]) -> None:
        """Offer ``blocks`` to no further text."""
        for block in blocks:
            self._by_key.pop(self._keys.pop(block, b""), None)
            if block in self._unused:
                del self._unused[block]
                heappush(self._free, block)

    def forget_unused(self) -> None:
        """Free the blocks without a text."""
        self.forget(list(self._unused))

    def compact(self) -> dict[int, int]:
        """Renumber the held blocks from 0 on, in order; return the new number of each."""
        numbers = {old: new for new, old in enumerate(sorted([*self._references, *self._unused]))}
        self._references = {numbers[block]: count for block, count in self._references.items()}
        self._unused = OrderedDict((numbers[block], None) for block in self._unused)
        self._keys = {numbers[block]: key for block, key in self._keys.items()}
        self._by_key = {key: block for block, key in self._keys.items()}
        self._free = []
        self.top = len(numbers)
        return numbers

    def _evict(self) -> None:
        """Free the unused block whose text ended first."""
        block, _ = self._unused.popitem(last=False)
        del self._by_key[self._keys.pop(block)]
        heappush(self._free, block)


@dataclass(eq=False)
class RequestText:
    """A request and its continuation."""

    number: int
    request: Request
    random: torch.Generator
    """Generator of the text's samples; only the last stage draws from it."""
    tokens: list[int]
    """Prompt and new tokens."""
    written: int = 0
    """Number of new tokens."""
    computed: int = 0
    """Number of positions in the cache, including those of a step in flight."""
    table: list[int] = field(default_factory=list)
    """The text's blocks, in the order of positions; empty for a waiting text."""
    keys: list[bytes] = field(default_factory=list)
    """Hashes of the text's first blocks."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Scores of the prompt's tokens in the chunks computed so far."""
    shares: bool = True
    """Whether it uses blocks that other texts have computed."""
    has_shared: bool = False
    """Whether it has used such blocks."""
    group: int | None = None
    """The group of texts that are computed together; None: waiting, finished or cancelled."""
    state: int = 0
    """Number of its states in the cache, while it is in a group."""

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next one can be chosen; 0: a step is in flight."""
        return len(self.tokens) - self.computed

    @property
    def is_scored(self) -> bool:
        """Whether the next steps report scores of the prompt's tokens."""
        return self.request.score_prompt and not self.written


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a text that a step computes."""

    text: RequestText
    first: int
    """Position of the first token."""
    count: int
    chooses: bool
    """Whether the text's next token is chosen after the segment."""
    rows: int
    """Number of the segment's last positions whose logits are needed."""


class TextScheduler:
    """Texts in ``groups`` that are computed alternately, and a queue of waiting texts.

    A step computes one token of each running text of a group, then chunks of prompts with up to ``max_tokens`` tokens
    in all, but at least one block; without ``chunked`` prompts are not divided. When no block is available, the
    group's text that came last returns its blocks and waits; it is computed again later. ``sharing``: texts share full
    blocks of a common prefix.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, groups: int, max_batch_size: int, max_tokens: int, chunked: bool,
        sharing: bool,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.block_size = block_size
        self.max_batch_size = max_batch_size
        self.max_tokens = max_tokens
        self.chunked = chunked
        self.sharing = sharing
        self.waiting: list[RequestText] = []
        self.groups: list[list[RequestText]] = [[] for _ in range(groups)]
        self._free_states = list(range(max_batch_size))
        self.preempted = 0
        """Number of times that a text returned its blocks."""
        self.reused = 0
        """Number of positions whose keys and values were computed for another text."""

    @property
    def running(self) -> int:
        """Number of texts with blocks."""
        return sum(map(len, self.groups))

    def add(self, text: RequestText) -> None:
        """Add a text to the queue, from the beginning of its computation."""
        text.prompt_scores.clear()
        insort(self.waiting, text, key=_number)

    def remove(self, text: RequestText) -> None:
        """Remove a text, and return its blocks."""
        if text.group is None:
            self.waiting = [other for other in self.waiting if other is not text]
            return
        self.groups[text.group].remove(text)
        self.pool.release(text.table)
        heappush(self._free_states, text.state)
        text.table = []
        text.computed = 0
        text.group = None

    def find(self, number: int) -> RequestText | None:
        """Return the waiting or running text with this number."""
        texts = (text for group in (*self.groups, self.waiting) for text in group)
        return next((text for text in texts if text.number == number), None)

    def compact(self) -> list[int]:
        """Renumber the held blocks from 0 on; return the old number of each."""
        numbers = self.pool.compact()
        for text in (running for group in self.groups for running in group):
            text.table = [numbers[block] for block in text.table]
        return list(numbers)

    def plan(self, slot: int) -> list[Segment]:
        """Return the segments of a group's next step, no segment of which is in flight, and count them as computed."""
        texts = self.groups[slot]
        segments = []
        for text in [running for running in texts if running.remaining == 1]:
            if text.group is not None and self._has_room(text):
                segments.append(self._segment(text, 1))
        budget = max(self.max_tokens - len(segments), self.block_size)
        tokens = 0
        for text in [running for running in texts if running.remaining > 1]:
            self._adopt(text)
            count = self._chunk(text.remaining, text.computed, budget, tokens)
            if count:
                segments.append(self._segment(text, count))
                tokens += count
        while self.waiting and len(texts) < self._places(slot):
            text = self.waiting[0]
            shared = self._shared_blocks(text)
            first = len(shared) * self.block_size
            count = self._chunk(len(text.tokens) - first, first, budget, tokens)
            if not count or not self._fits(text, shared):
                break
            self._admit(text, slot, shared)
            segments.append(self._segment(text, count))
            tokens += count
        return segments

    def _chunk(self, remaining: int, first: int, budget: int, tokens: int) -> int:
        """Number of tokens of a prompt in a step that has ``tokens`` of other prompts.

        All ``remaining`` tokens if possible, otherwise those up to the end of a block.
        """
        if remaining <= budget - tokens:
            return remaining
        if self.chunked:
            return max((first + budget - tokens) // self.block_size * self.block_size - first, 0)
        return 0 if tokens else remaining

    def _segment(self, text: RequestText, count: int) -> Segment:
        """Count the next tokens as computed, and register the blocks that they fill."""
        chooses = count == text.remaining
        rows = count if text.is_scored else int(chooses)
        segment = Segment(text, text.computed, count, chooses, rows)
        full = range(text.computed // self.block_size, (text.computed + count) // self.block_size)
        text.computed += count
        for index in full if self.sharing and text.shares else ():
            self.pool.register(text.table[index], self._key(text, index))
        return segment

    def _key(self, text: RequestText, index: int) -> bytes:
        """Hash of the text up to the end of a block."""
        for block in range(len(text.keys), index + 1):
            parent = text.keys[block - 1] if block else b""
            text.keys.append(block_key(parent, text.tokens[block * self.block_size : (block + 1) * self.block_size]))
        return text.keys[index]

    def _may_share(self, text: RequestText) -> bool:
        """Whether the text may use blocks that others have computed: not to score all tokens of its prompt."""
        return self.sharing and text.shares and not text.is_scored

    def _shared_blocks(self, text: RequestText) -> list[int]:
        """The registered blocks with the text's first tokens; at least one token is left to compute."""
        blocks: list[int] = []
        if not self._may_share(text):
            return blocks
        for index in range((len(text.tokens) - 1) // self.block_size):
            block = self.pool.find(self._key(text, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _adopt(self, text: RequestText) -> None:
        """Use blocks that other texts have computed since the text's last chunk."""
        if not self._may_share(text) or text.computed % self.block_size:
            return
        for index in range(text.computed // self.block_size, (len(text.tokens) - 1) // self.block_size):
            block = self.pool.find(self._key(text, index))
            if block is None:
                return
            self.pool.share(block)
            self.pool.release([text.table[index]])
            text.table[index] = block
            text.computed += self.block_size
            text.has_shared = True
            self.reused += self.block_size

    def _places(self, slot: int) -> int:
        """Largest number of texts in a group, so that all groups get as many."""
        total = self.running + len(self.waiting)
        count = len(self.groups)
        return min(_part(total, count, slot), _part(self.max_batch_size, count, slot))

    def _fits(self, text: RequestText, shared: Sequence[int]) -> bool:
        """Whether there are blocks for the text, and one more for each running text."""
        revived = sum(map(self.pool.is_unused, shared))
        needed = self._blocks(len(text.tokens)) - len(shared) + revived
        return needed + self.running <= self.pool.available

    def _admit(self, text: RequestText, slot: int, shared: list[int]) -> None:
        """Move the first waiting text to a group, with all blocks of its tokens."""
        self.waiting.pop(0)
        for block in shared:
            self.pool.share(block)
        missing = self._blocks(len(text.tokens)) - len(shared)
        text.table = shared + [self.pool.allocate() for _ in range(missing)]
        text.computed = len(shared) * self.block_size
        text.group = slot
        text.state = heappop(self._free_states)
        text.has_shared = bool(shared)
        self.reused += text.computed
        insort(self.groups[slot], text, key=_number)

    def _has_room(self, text: RequestText) -> bool:
        """Allocate the block of the text's next token, if necessary from texts of the group that came later."""
        while len(text.table) < self._blocks(text.computed + 1):
            if self.pool.available:
                text.table.append(self.pool.allocate())
                continue
            assert text.group is not None, "a running text"
            youngest = self.groups[text.group][-1]
            self.remove(youngest)
            self.add(youngest)  # it waits again, without its blocks
            self.preempted += 1
            if youngest is text:
                return False
        return True

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)


def _number(text: RequestText) -> int:
    return text.number


def _part(total: int, count: int, index: int) -> int:
    """Size of part ``index`` of ``total`` items divided as equally as possible."""
    return total // count + (index < total % count)
