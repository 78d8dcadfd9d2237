"""From generated tokens to text that can be shown while it is generated."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_core.tokenizers import Tokenizer


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The part of ``text`` that can be printed now, and whether one of ``stops`` ends it there.

    Not printed yet: an incomplete UTF-8 character (U+FFFD at the end), and the beginning of a possible stop string.
    """
    found = [text.index(stop) for stop in stops if stop in text]
    if found:
        return text[: min(found)], True
    text = text.rstrip("\ufffd")
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(begun, default=0)], False


@dataclass
class TextStream:
    """The text of new tokens, piece by piece, up to the first of ``stops``."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    text: str = ""
    """What has been returned."""
    stopped: bool = False
    """Whether a stop string has ended the text."""
    _whole: str = ""
    """The text of all tokens up to the last one that ends a character."""
    _known: list[int] = field(default_factory=list)
    """The last tokens of it: what a token's text is may depend on those before it."""
    _new: list[int] = field(default_factory=list)
    """The tokens behind it."""

    def add(self, token: int) -> str:
        """What can be shown after one more token."""
        self._new.append(token)
        gained = self._gained()
        if not gained.endswith("\ufffd"):
            self._whole += gained
            self._known, self._new = self._new, []
        settled, self.stopped = until_stop(self._whole, self.stops)
        return self._show(settled)

    def finish(self) -> str:
        """What was held back, when no further token comes."""
        return "" if self.stopped else self._show(self._whole + self._gained())

    def _gained(self) -> str:
        """The text of the new tokens."""
        if not self._new:
            return ""
        return self.tokenizer.detokenize(self._known + self._new)[len(self.tokenizer.detokenize(self._known)) :]

    def _show(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new
