"""Words that expansions are made into, split at separators."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_core.shell.limits import require_size
from megatron_core.shell.unknown import UNKNOWN

BLANKS = " \t\n\r"


@dataclass
class Fields:
    """Words that are being built."""

    separators: str | None
    """Characters at which unquoted values are split (IFS); None: not at all, the result is one word."""
    escape: Callable[[str], str] = str
    """Function that changes quoted text; patterns escape it."""
    done: list[str] = field(default_factory=list)
    current: str | None = None
    size: int = 0
    """Number of characters and words so far."""

    @property
    def whole(self) -> bool:
        """Whether the result is one word."""
        return self.separators is None

    def flush(self) -> None:
        """End the current word, if there is one."""
        if self.current is not None and not self.whole:
            self.done.append(self.current)
            self.size += 1
            self.current = None

    def literal(self, text: str) -> None:
        """Add text of the script that is neither quoted nor a value. ``ConfigError`` if all texts are too long."""
        self.size += len(text)
        require_size(self.size, "a word")
        self.current = (self.current or "") + text

    def quoted(self, text: str) -> None:
        """Add quoted text, which may be empty."""
        self.literal(self.escape(text))

    def unquoted(self, text: str) -> None:
        """Add a value, which ends words at separators; blanks count together, each other separator alone."""
        if self.separators is None:
            if text:
                self.literal(text)
            return
        soft = "".join(char for char in self.separators if char in BLANKS)
        hard = "".join(char for char in self.separators if char not in BLANKS)
        blank, mark = (f"[{re.escape(chars)}]" if chars else "(?:(?!))" for chars in (soft, hard))
        position = 0
        for match in re.finditer(f"{UNKNOWN.pattern}|(?P<end>{blank}*{mark}{blank}*|{blank}+)", text):
            if match["end"] is None:
                continue
            if match.start() > position:
                self.literal(text[position : match.start()])
            if any(char in hard for char in match["end"]):
                self.literal("")
            self.flush()
            position = match.end()
        if position < len(text):
            self.literal(text[position:])

    def several(self, values: list[str], *, quoted: bool) -> None:
        """Add values that are words of their own."""
        if self.separators and not quoted:  # as bash does: an empty value between two others is a word, or not
            self.unquoted(self.separators[0].join(values))
            return
        for number, value in enumerate(values):
            if number and self.whole:
                self.literal(" ")
            elif number:
                self.flush()
            (self.quoted if quoted else self.unquoted)(value)
