"""OpenAI's completions and chat completions: what a request asks for, and how its results are written."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_core.errors import DataError
from megatron_core.inference.engine import Progress, Request, TokenScore
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.text import TextStream
from megatron_core.tokenizers import Tokenizer, end_ids
from megatron_core.tokenizers.chat import ChatTemplate

Json = dict[str, Any]
MOST_LOGPROBS, MOST_STOPS = 20, 16
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Keys of clients that change nothing about the text."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Keys that are not supported -> the values, beside null, that ask for nothing."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    max_length: int
    """Tokens of a prompt and its continuation."""
    max_choices: int = 64
    """Prompts times ``n``."""


@dataclass
class Choice:
    """One continuation and what it has become so far."""

    index: int
    request: Request
    stream: TextStream
    echo: str = ""
    scores: list[tuple[int, TokenScore | None]] = field(default_factory=list)
    """The tokens that are reported with their scores: the prompt's, too, if it is scored."""
    written: int = 0
    finished: str | None = None

    def add(self, progress: Progress) -> str:
        """The text that the engine's next progress adds."""
        request = self.request
        if request.score_prompt and not self.scores:
            self.scores = list(zip(request.prompt, (None, *progress.prompt_scores), strict=True))
        shown = ""
        if progress.token is not None:
            self.written += 1
            self.scores.append((progress.token, progress.score))  # the end's too: clients count on one for each token
            if progress.finished != "stop":
                shown = self.stream.add(progress.token)
        self.finished = "stop" if self.stream.stopped else progress.finished
        return shown + (self.stream.finish() if self.finished else "")


@dataclass(frozen=True)
class Job:
    """A web request in the engine's terms."""

    chat: bool
    choices: list[Choice]
    stream: bool
    include_usage: bool
    prompt_tokens: int

    def usage(self) -> Json:
        """Numbers of tokens."""
        written = sum(choice.written for choice in self.choices)
        total = self.prompt_tokens + written
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": written, "total_tokens": total}


class Protocol:
    """Reads requests for a model and writes its results."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, limits: Limits, model: str, vocab_size: int
    ) -> None:
        self.tokenizer, self.template, self.limits, self.model = tokenizer, template, limits, model
        self._vocab_size = vocab_size
        self._ends = end_ids(tokenizer)

    def job(self, asked: Any, *, chat: bool) -> Job:
        """The job of a request's JSON; ``DataError``, one sentence, for what is wrong or not supported."""
        if not isinstance(asked, dict):
            raise DataError("the request is not a JSON object")
        try:
            json.dumps(asked, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError("a text has half of a surrogate pair, which is not valid Unicode") from None
        asked = {key: value for key, value in asked.items() if value is not None}
        fields = _Fields(asked)
        prompts = [self._messages(asked)] if chat else self._prompts(fields)
        stop = fields.take("stop", (str, list), [])
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
            raise DataError(f"stop must be a text or a list of at most {MOST_STOPS} texts, none of them empty")
        number = fields.whole("n", 1, 1, self.limits.max_choices)
        if number * len(prompts) > self.limits.max_choices:
            raise DataError(f"{len(prompts)} prompts times n={number} is more than {self.limits.max_choices} choices")
        logprobs = self._logprobs(fields, chat)
        echo = not chat and fields.take("echo", (bool,), False)
        new_tokens = self._new_tokens(fields, chat)
        sampling = self._sampling(fields)
        stream = fields.take("stream", (bool,), False)
        include_usage = bool(fields.take("stream_options", (dict,), {}).get("include_usage", False))
        fields.take("model", (str,), self.model)
        fields.check_rest()
        if stream and echo and logprobs is not None:
            raise DataError("echo with logprobs is not streamed; leave stream out")
        choices = []
        for index in range(number * len(prompts)):
            prompt = prompts[index // number]
            request = Request(
                prompt=tuple(prompt),
                max_new_tokens=min(new_tokens, self._room(prompt)),
                sampling=Sampling(**sampling | {"seed": (sampling["seed"] + index % number) % 2**63}),
                ends=self._ends,
                logprobs=logprobs,
                score_prompt=echo and logprobs is not None,
            )
            shown = self.tokenizer.detokenize(prompt) if echo else ""
            choices.append(Choice(index, request, TextStream(self.tokenizer, stops), shown))
        return Job(chat, choices, stream, include_usage, sum(map(len, prompts)))

    def choice_json(self, job: Job, choice: Choice) -> Json:
        """A finished choice."""
        text = choice.echo + choice.stream.text
        content: Json = {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
        return {"index": choice.index, **content, "logprobs": self._scores_json(job, choice, 0), **_reason(choice)}

    def delta_json(self, job: Job, choice: Choice, text: str, first: int) -> Json:
        """What a streamed choice has gained; ``first``: how many of its tokens were reported before."""
        content: Json = {"delta": {"content": text}} if job.chat else {"text": text}
        return {"index": choice.index, **content, "logprobs": self._scores_json(job, choice, first), **_reason(choice)}

    def _scores_json(self, job: Job, choice: Choice, first: int) -> Json | None:
        if choice.request.logprobs is None:
            return None
        tokens = choice.scores[first:]
        if job.chat:
            return {"content": [self._chat_score(token, score) for token, score in tokens]}
        texts = [self._text(token) for token, _ in tokens]
        before = sum(len(self._text(token)) for token, _ in choice.scores[:first])
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else score.logprob for _, score in tokens],
            "top_logprobs": [
                None if score is None else {self._text(i): value for i, value in score.alternatives}
                for _, score in tokens
            ],
            "text_offset": [before + sum(map(len, texts[:i])) for i in range(len(texts))],
        }

    def _chat_score(self, token: int, score: TokenScore | None) -> Json:
        assert score is not None, "of a prompt's first token, which chats do not score"
        pairs = [(token, score.logprob), *score.alternatives]
        own, *others = ({"token": self._text(i), "logprob": value, "bytes": None} for i, value in pairs)
        return {**own, "top_logprobs": others}

    def _text(self, token: int) -> str:
        return self.tokenizer.detokenize([token])

    def _messages(self, asked: Json) -> list[int]:
        """The prompt of a chat."""
        messages = asked.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            raise DataError("messages must be a list of objects with role and content")
        if self.template is None:
            raise DataError("this model has no chat template; use /v1/completions, or start with --chat-template FILE")
        read = [_message(each) for each in messages]
        text = self.template.render(read)
        nameless = [{"role": each["role"], "content": each["content"]} for each in read]
        if nameless != read and self.template.render(nameless) == text:
            raise DataError("the model's chat template does not use the name of a message; leave it out")
        return self.tokenizer.tokenize(text)

    def _prompts(self, fields: _Fields) -> list[list[int]]:
        prompt = fields.take("prompt", (str, list), None)
        prompts = prompt if isinstance(prompt, list) and not _are_tokens(prompt) else [prompt]
        if not prompts or not all(isinstance(each, str) or _are_tokens(each) for each in prompts):
            raise DataError("prompt must be a text, a list of token ids, or a list of one of them")
        found = [self.tokenizer.tokenize(each) if isinstance(each, str) else each for each in prompts]
        for each in found:
            if not each:
                raise DataError("the prompt has no token; give at least one character")
            if min(each) < 0 or max(each) >= self._vocab_size:
                raise DataError(f"the prompt has tokens outside of the vocabulary, 0 to {self._vocab_size - 1}")
        return found

    def _room(self, prompt: Sequence[int]) -> int:
        room = self.limits.max_length - len(prompt)
        if room < 1:
            raise DataError(f"the prompt has {len(prompt)} tokens; at most {self.limits.max_length - 1} are possible")
        return room

    def _new_tokens(self, fields: _Fields, chat: bool) -> int:
        """0 is for scoring prompts alone, and for completions only."""
        most = self.limits.max_length
        if not chat:
            return fields.whole("max_tokens", 16, 0, None)
        old = fields.whole("max_tokens", most, 1, None)
        return fields.whole("max_completion_tokens", old, 1, None)

    def _logprobs(self, fields: _Fields, chat: bool) -> int | None:
        if not chat:
            return fields.whole("logprobs", None, 0, MOST_LOGPROBS)
        wanted = fields.take("logprobs", (bool,), False)
        most = fields.whole("top_logprobs", 0, 0, MOST_LOGPROBS)
        return most if wanted else None

    def _sampling(self, fields: _Fields) -> Json:
        return {
            "temperature": fields.number("temperature", 1.0, 0.0, 100.0),
            "top_p": fields.number("top_p", 1.0, 1e-6, 1.0),
            "top_k": fields.whole("top_k", 0, 0, None),
            "seed": fields.whole("seed", secrets.randbits(31), 0, 2**63 - 1),
        }


class _Fields:
    """The keys of a request, each taken once; ``DataError`` for a value of another kind."""

    def __init__(self, asked: Json) -> None:
        self._left = asked

    def take(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        """A value of one of ``kinds``."""
        value = self._left.pop(name, default)
        if value is default or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            return value
        raise DataError(f"{name} must be {' or '.join(_KINDS[kind] for kind in kinds)}, not {_shown(value)}")

    def whole(self, name: str, default: int | None, least: int, most: int | None) -> Any:
        """A whole number in bounds."""
        value = self.take(name, (int,), default)
        if value is not None and (value < least or (most is not None and value > most)):
            raise DataError(f"{name}={_shown(value)} must be {least} {'or more' if most is None else f'to {most}'}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number in bounds."""
        value = self.take(name, (int, float), default)
        if not least <= value <= most:
            raise DataError(f"{name}={_shown(value)} must be {least:g} to {most:g}")
        return float(value)

    def check_rest(self) -> None:
        """``DataError`` for keys that ask for something that is not there."""
        for name, value in self._left.items():
            if name not in IGNORED and value not in NEUTRAL.get(name, ()):
                known = "is not supported" if name in NEUTRAL else "is not a parameter of this server"
                raise DataError(f"{_shown(name)} {known}; leave it out")


_KINDS = {
    str: "a text",
    list: "a list",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
}


def _message(message: Any) -> Mapping[str, Any]:
    """A message whose content is one text, with its name if it has one."""
    given = {key: value for key, value in message.items() if value} if isinstance(message, dict) else {}
    if other := sorted(given.keys() - {"role", "content", "name"}):
        raise DataError(f"{_shown(other[0])} of a message is not supported; leave it out")
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise DataError("each of messages must have a role and a content of text")
    if not isinstance(given.get("name", ""), str):
        raise DataError("the name of a message must be a text")
    return given | {"role": message["role"], "content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(each) is int for each in value)


def _reason(choice: Choice) -> Json:
    return {"finish_reason": choice.finished}


def _shown(value: Any, most: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."
