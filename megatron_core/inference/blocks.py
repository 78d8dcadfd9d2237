"""Blocks of the key-value cache: allocation, sharing between texts with a common prefix, and reuse of unused blocks."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from megatron_core.errors import LayoutError

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
