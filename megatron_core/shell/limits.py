"""Bounds of time and memory for scripts that may be hostile."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_core.errors import ConfigError

LONGEST = 1_000_000
"""Maximum number of characters and words of a value, and of the words of a command."""
MOST_CHARACTERS = 50 * LONGEST
"""Maximum number of characters and words of all values, outputs and commands of a script."""
MOST_SECONDS = 10.0
"""Maximum time of the processor; public launch scripts take less than 1 s."""


class _Expired(Exception):
    """Raised in the main thread after the time; no ``ValueError``, which the reader handles."""


@contextmanager
def limited_time(script: str, seconds: float = MOST_SECONDS) -> Iterator[None]:
    """``ConfigError`` after ``seconds`` of the processor, also within a regular expression; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise _Expired

    before = signal.signal(signal.SIGVTALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    except _Expired:
        raise ConfigError(f"{script}: following it takes more than {seconds:g} s; give its launch command") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def require_size(size: int, what: str, most: int = LONGEST) -> None:
    """``ConfigError`` if ``what`` has more than ``most`` characters."""
    if size > most:
        raise ConfigError(f"{what} has more than {most} characters; give the launch command instead of the script")


def join_texts(texts_or_none: Iterable[str | None], what: str) -> str | None:
    """All texts in one; None if one of them is not known. Errors: ``ConfigError`` if it is too long."""
    texts = list[str]()
    size = 0
    for text in texts_or_none:
        if text is None:
            return None
        texts.append(text)
        size += len(text)
        require_size(size, what)
    return "".join(texts)
