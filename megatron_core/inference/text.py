"""From generated tokens to text that can be shown while it is generated."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_core.tokenizers import Tokenizer

MOST_UNSETTLED, OF_A_CHARACTER = 12, 3
"""Tokens without a complete character after which the text of all but the last three, which may begin one, is shown."""


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The part of ``text`` that can be printed now, and whether one of ``stops`` ends it there.

    The beginning of a possible stop string is not printed yet.
    """
    found = [text.index(stop) for stop in stops if stop in text]
    if found:
        return text[: min(found)], True
    return text[: min((_begin_of(stop, text) for stop in stops), default=len(text))], False


def _begin_of(stop: str, text: str) -> int:
    """Where the end of ``text`` is the beginning of ``stop``; the length of ``text`` if nowhere."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)


@dataclass
class TextStream:
    """The text of new tokens, piece by piece, up to the first of ``stops``.

    The work for a token does not depend on how many came before it.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    stopped: bool = False
    """Whether a stop string has ended the text."""
    _shown: list[str] = field(default_factory=list)
    """What has been returned."""
    _held: str = ""
    """Complete characters that are not shown yet, as they may begin a stop string."""
    _known: list[int] = field(default_factory=list)
    """The last tokens of complete characters: a token's text may depend on those before it."""
    _new: list[int] = field(default_factory=list)
    """The tokens behind them."""

    @property
    def text(self) -> str:
        """What has been returned."""
        return "".join(self._shown)

    def add(self, token: int) -> str:
        """What can be shown after one more token."""
        self._new.append(token)
        gained = self._gained()
        if not gained.endswith("\ufffd"):
            self._settle(gained, len(self._new))
        elif len(self._new) > MOST_UNSETTLED:  # not the beginning of a character
            count = len(self._new) - OF_A_CHARACTER
            self._settle(self._gained(count), count)
        shown, self.stopped = until_stop(self._held, self.stops)
        return self._show(shown)

    def finish(self) -> str:
        """What was held back, when no further token comes."""
        return "" if self.stopped else self._show(self._held + self._gained())

    def _settle(self, gained: str, count: int) -> None:
        """Take ``gained`` as the text of the first ``count`` new tokens."""
        self._held += gained
        self._known, self._new = self._new[:count], self._new[count:]

    def _gained(self, count: int | None = None) -> str:
        """The text of the first ``count`` new tokens, by default of all."""
        if not self._new:
            return ""
        known = len(self.tokenizer.detokenize(self._known))
        return self.tokenizer.detokenize(self._known + self._new[:count])[known:]

    def _show(self, text: str) -> str:
        self._shown.append(text)
        self._held = self._held[len(text) :]
        return text
