"""Environments: they ask, reply to the turns of a policy, and reward them; in Python or over HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from megatron_core.errors import ConfigError, DataError, quoted

MOST_BYTES = 2**24
"""Largest answer of an environment over HTTP."""

TextOrTokens = str | Sequence[int]
"""A text, which is tokenized once, or token ids."""


@dataclass(frozen=True)
class Turn:
    """The tokens that the policy has written after the last text of the environment."""

    tokens: tuple[int, ...]
    text: str
    """Their text; "" without a tokenizer."""
    finished: str
    """``stop`` or ``length``, as in ``Answer.finished``."""


@dataclass(frozen=True)
class Reply:
    """An environment's reply to a turn."""

    reward: float = 0.0
    text: TextOrTokens = ()
    """Tokens before the next turn that the policy does not learn, such as the result of a tool."""
    done: bool = False
    """The episode ends; ``text`` is not written."""


class Environment(Protocol):
    """One episode: a task, with which a policy talks in turns. A new object is created for each episode."""

    def reset(self) -> TextOrTokens:
        """The prompt."""

    def step(self, turn: Turn) -> Reply:
        """The reply to a turn."""


Message = dict[str, str]
"""``role``, which is ``user``, ``assistant`` or ``tool``, and ``content``."""


class FunctionEnvironment:
    """A prompt, and a function of the messages so far.

    The function returns a number, the reward of the episode, which ends; a text, to which the policy replies in a next
    turn; or a ``Reply``. Messages are texts: the run needs a tokenizer.
    """

    def __init__(self, prompt: str, function: Callable[[list[Message]], float | str | Reply]) -> None:
        self.name = f"FunctionEnvironment of {getattr(function, '__name__', 'a function')}"
        self._messages: list[Message] = [{"role": "user", "content": prompt}]
        self._function = function

    def reset(self) -> str:
        """The prompt."""
        return self._messages[0]["content"]

    def step(self, turn: Turn) -> Reply:
        """The function's result."""
        self._messages.append({"role": "assistant", "content": turn.text})
        # A copy: the function may change its argument.
        result = self._function([dict(message) for message in self._messages])
        if isinstance(result, Reply):
            reply = result
        elif isinstance(result, str):
            reply = Reply(text=result)
        else:
            reply = Reply(reward=result, done=True)
        if isinstance(reply.text, str) and not reply.done:
            self._messages.append({"role": "tool", "content": reply.text})
        return reply


class HttpEnvironment:
    """An episode of an environment in another program, which has two addresses below ``url``.

    ``POST /reset`` with ``{"task": task}`` answers ``{"episode": ..., "prompt": text or token ids}``. ``POST /step``
    with the episode and the fields of ``Turn`` answers the fields of ``Reply``. ``task``: anything that JSON can hold.
    ``timeout``: seconds for each answer.
    """

    def __init__(self, url: str, task: Any = None, *, timeout: float = 60.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={quoted(url)} of an environment must start with http:// or https://")
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout} of the environment {url}: give more than 0 seconds")
        self.name = f"HttpEnvironment {url}"
        self._url = url.rstrip("/")
        self._task = task
        self._timeout = timeout
        self._episode: Any = None

    def reset(self) -> TextOrTokens:
        """The prompt."""
        answer = self._post("reset", {"task": self._task}, {"episode", "prompt"}, set())
        self._episode = answer["episode"]
        return answer["prompt"]

    def step(self, turn: Turn) -> Reply:
        """The reply to a turn."""
        return Reply(
            **self._post("step", {"episode": self._episode, **asdict(turn)}, set(), {"reward", "text", "done"})
        )

    def _post(self, address: str, body: Any, required: set[str], optional: set[str]) -> dict[str, Any]:
        """The JSON object that the program answers. Errors: ``DataError`` for any other answer, and for none."""
        url = f"{self._url}/{address}"
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                content = response.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(MOST_BYTES).decode(errors="replace")
            raise DataError(f"{url} answered {error.code}: {quoted(text)}; see the log of that program") from None
        except OSError as error:  # also no connection, and no answer in time
            raise DataError(f"{url} gave no answer ({error}); is it running? timeout={self._timeout} s") from None
        if len(content) > MOST_BYTES:
            raise DataError(f"{url} answered more than {MOST_BYTES} bytes; shorten its texts")
        try:
            answer = json.loads(content)
        except ValueError:
            raise DataError(f"{url} did not answer JSON: {quoted(content.decode(errors='replace'))}") from None
        if not isinstance(answer, dict) or not required <= set(answer) <= required | optional:
            fields = ", ".join(sorted(required | optional))
            raise DataError(f"{url} answered {quoted(answer)}; the fields are {fields}")
        return answer
