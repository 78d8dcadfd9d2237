"""Conversion of generated tokens to text during generation."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from megatron_core.tokenizers import Tokenizer

MOST_UNSETTLED = 12
OF_A_CHARACTER = 3
"""After this number of tokens without a complete character, all but the last three are converted as they are."""
BEFORE = 8
"""Number of the prompt's last tokens that are converted with the first new token."""


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the part of ``text`` that can be shown now, and whether one of ``stops`` ends it.

    The beginning of a possible stop string is held back.
    """
    positions = [text.index(stop) for stop in stops if stop in text]
    if positions:
        return text[: min(positions)], True
    return text[: min((_begin_of(stop, text) for stop in stops), default=len(text))], False


def _begin_of(stop: str, text: str) -> int:
    """Start of the suffix of ``text`` that is a prefix of ``stop``; the length of ``text`` if there is none."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)


class TokenTexts:
    """Texts of single tokens that continue a text: SentencePiece omits the space before the first word of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.tokenize("0")  # all tokenizers have text for it, also those of numbers
        self._length = len(tokenizer.detokenize(self._before))

    def __call__(self, token: int, *, begins: bool = False) -> str:
        """Text of a token; ``begins``: as the first one of a text."""
        if begins:
            return self._tokenizer.detokenize([token])
        return self._tokenizer.detokenize([*self._before, token])[self._length :]


@dataclass
class TextStream:
    """Incremental text of new tokens, up to the first of ``stops``.

    ``prompt``: tokens that the text continues, which decide whether it begins with a space; without them the text is
    converted as a text of its own. The work per token does not depend on the number of earlier tokens.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    prompt: InitVar[Sequence[int]] = ()
    stopped: bool = False
    """Whether a stop string ended the text."""
    _shown: list[str] = field(default_factory=list)
    """Text returned so far."""
    _held: str = ""
    """Complete characters held back because they may begin a stop string."""
    _known: list[int] = field(default_factory=list)
    """The last tokens with complete characters: the text of a token may depend on tokens before it."""
    _new: list[int] = field(default_factory=list)
    """The tokens after ``_known``."""

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self._known = list(prompt[-BEFORE:])

    @property
    def text(self) -> str:
        """Text returned so far."""
        return "".join(self._shown)

    def add(self, token: int) -> str:
        """Add a token; return the text that can now be shown."""
        self._new.append(token)
        gained = self._gained()
        if not gained.endswith("\ufffd"):
            self._settle(gained, len(self._new))
        elif len(self._new) > MOST_UNSETTLED:  # not the beginning of a character
            count = len(self._new) - OF_A_CHARACTER
            self._settle(self._gained(count), count)
        visible, self.stopped = until_stop(self._held, self.stops)
        return self._show(visible)

    def finish(self) -> str:
        """Return the text held back, up to a stop string in the last token; no further token follows."""
        if self.stopped:
            return ""
        self._held += self._gained()
        visible, self.stopped = until_stop(self._held, self.stops)
        return self._show(visible if self.stopped else self._held)

    def _settle(self, gained: str, count: int) -> None:
        """Record ``gained`` as the text of the first ``count`` new tokens."""
        self._held += gained
        self._known = self._new[:count]
        self._new = self._new[count:]

    def _gained(self, count: int | None = None) -> str:
        """Text of the first ``count`` new tokens, by default of all new tokens."""
        if not self._new:
            return ""
        known = len(self.tokenizer.detokenize(self._known))
        return self.tokenizer.detokenize(self._known + self._new[:count])[known:]

    def _show(self, text: str) -> str:
        self._shown.append(text)
        self._held = self._held[len(text) :]
        return text
