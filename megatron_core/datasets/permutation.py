"""A shuffled order that is computed, not stored: place i of it is a pure function of size, key and i."""

from math import isqrt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# Four rounds make a pseudo-random permutation of a good round function (Luby and Rackoff 1988); small domains
# want more, and eight cost about 10 microseconds a sample.
ROUNDS = 8


def mix64(*values: int) -> int:
    """A 64-bit hash of integers, order and count included.

    Each value is folded in and followed by the finaliser of splitmix64 (Steele, Lea and Flood 2014). Values
    count modulo 2**64.
    """
    state = len(values)
    for value in values:
        state = _finalise(((state + _GOLDEN) & _MASK) ^ _finalise((value + _GOLDEN) & _MASK))
    return state


class KeyedPermutation:
    """A permutation of range(size), chosen by a key: `p[i]`, in constant memory.

    A Feistel network on pairs (left in [0, a), right in [0, b)) with a * b >= size; a result past the end
    goes through the network again until it falls inside (cycle walking; Black and Rogaway 2002), which keeps
    it a bijection. a * b exceeds size by less than a, so a second pass is rare.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} numbers: at least one is needed")
        self._size = size
        self._left = isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        self._round_keys = tuple(mix64(*key, number) for number in range(ROUNDS))

    def __len__(self) -> int:
        """The number of places."""
        return self._size

    def __getitem__(self, index: int) -> int:
        """The number at a place, 0 <= index < size."""
        if not 0 <= index < self._size:
            raise IndexError(f"place {index} of a permutation of {self._size}")
        place = self._pass(index)
        while place >= self._size:
            place = self._pass(place)
        return place

    def _pass(self, place: int) -> int:
        left, right = divmod(place, self._right)
        for number, key in enumerate(self._round_keys):
            # Each round can be undone: it adds to one half something that only the other half decides.
            if number % 2:
                left = (left + _finalise(key ^ right)) % self._left
            else:
                right = (right + _finalise(key ^ left)) % self._right
        return left * self._right + right


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
