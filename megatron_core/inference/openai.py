"""OpenAI's completions and chat completions: from a request to the engine, and from results to JSON."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from megatron_core.errors import DataError
from megatron_core.features.conversations.chat_template import ChatTemplate
from megatron_core.inference.openai_requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    RequestError,
    read_request,
    shown_value,
)
from megatron_core.inference.requests import Progress, Request, TokenScore
from megatron_core.inference.sampling import Sampling
from megatron_core.inference.text import TextStream, TokenTexts
from megatron_core.tokenizers import Tokenizer, end_ids

Json = dict[str, Any]
COMPLETION_TOKENS = 16
"""Default of max_tokens for completions, as in OpenAI's interface."""
TEMPLATE_SECONDS = 5.0
"""Time limit for rendering a chat template."""
LEAST_TOP_P = 1e-6
"""Only the most likely token has a smaller probability of more likely tokens."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request."""

    max_length: int
    """Maximum number of tokens of a prompt and its continuation."""
    max_choices: int = 64
    """Maximum number of prompts times ``n``."""


@dataclass
class Continuation:
    """One continuation and its state."""

    index: int
    request: Request
    stream: TextStream
    echo: str = ""
    scores: list[tuple[int, TokenScore | None]] = field(default_factory=list)
    """Tokens and scores to report, including the prompt's tokens if they are scored."""
    reported: int = 0
    """Number of characters of the tokens with reported scores."""
    written: int = 0
    finished: str | None = None

    def add(self, progress: Progress) -> str:
        """Add the engine's next progress; return the new text."""
        request = self.request
        if request.score_prompt and not self.scores:
            self.scores = list(zip(request.prompt, (None, *progress.prompt_scores), strict=True))
        text = ""
        if progress.token is not None:
            self.written += 1
            self.scores.append(
                (progress.token, progress.score)
            )  # also the end token: clients expect a score for each token
            if progress.finished != "stop":
                text = self.stream.add(progress.token)
        if progress.finished:
            text += self.stream.finish()
        self.finished = "stop" if self.stream.stopped else progress.finished
        return text


@dataclass(frozen=True)
class WebJob:
    """A web request as requests of the engine."""

    chat: bool
    choices: list[Continuation]
    stream: bool
    include_usage: bool
    prompt_tokens: int

    def usage(self) -> Json:
        """Numbers of tokens."""
        written = sum(choice.written for choice in self.choices)
        total = self.prompt_tokens + written
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": written, "total_tokens": total}


class Protocol:
    """Converts requests for a model and its results; ``begin`` adds tokens before a prompt that is given as text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: RequestLimits,
        model: str,
        vocab_size: int,
        begin: Callable[[Sequence[int]], list[int]] = list,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.limits = limits
        self.model = model
        self._vocab_size = vocab_size
        self._begin = begin
        self._ends = end_ids(tokenizer)
        self._text = TokenTexts(tokenizer)

    def job(self, body: bytes, *, chat: bool) -> WebJob:
        """Parse the JSON of a request; ``RequestError`` if it is illegal or not supported."""
        if chat:
            parsed: ChatRequest | CompletionRequest = read_request(ChatRequest, body)
        else:
            parsed = read_request(CompletionRequest, body)
        if parsed.model is not None:
            self.check_model(parsed.model)
        number = parsed.n
        most = self.limits.max_choices
        count = 1 if isinstance(parsed, ChatRequest) else len(parsed.prompt)
        if number * count > most:
            raise RequestError(
                f"{count} prompts times n={shown_value(number)} is more than {most} choices; give fewer", "n"
            )
        if isinstance(parsed, ChatRequest):
            prompts = [self._chat_prompt(parsed.messages)]
            echo = False
            logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
        else:
            prompts = self._prompts(parsed.prompt)
            echo = parsed.echo
            logprobs = parsed.logprobs
        seed = secrets.randbits(31) if parsed.seed is None else parsed.seed
        settings: Json = {
            "temperature": parsed.temperature,
            "top_p": max(parsed.top_p, LEAST_TOP_P),
            "top_k": max(parsed.top_k, 0),
        }
        ends = (frozenset() if parsed.ignore_eos else self._ends) | frozenset(parsed.stop_token_ids)
        choices = []
        for index in range(number * len(prompts)):
            prompt = prompts[index // number]
            request = Request(
                prompt=tuple(prompt),
                max_new_tokens=self._new_tokens(parsed, len(prompt)),
                sampling=Sampling(**settings, seed=(seed + index % number) % 2**63),
                ends=ends,
                logprobs=logprobs,
                score_prompt=echo and logprobs is not None,
            )
            echoed = self._echo(parsed, index // number, prompt) if echo else ""
            # An answer of a chat is a text of its own; a completion continues its prompt.
            stream = TextStream(self.tokenizer, parsed.stop, () if chat else prompt)
            choices.append(Continuation(index, request, stream, echoed))
        include_usage = parsed.stream_options is not None and parsed.stream_options.include_usage
        return WebJob(chat, choices, parsed.stream, include_usage, sum(map(len, prompts)))

    def _echo(self, request: ChatRequest | CompletionRequest, number: int, prompt: Sequence[int]) -> str:
        """A prompt as it was given, or the text of its tokens if these are reported."""
        text = request.prompt[number] if isinstance(request, CompletionRequest) and request.logprobs is None else None
        return text if isinstance(text, str) else self.tokenizer.detokenize(prompt)

    def check_model(self, name: str) -> None:
        """``RequestError`` unless the model has this name."""
        if name != self.model:
            message = f"model={shown_value(name)} does not exist; give {self.model!r}, or remove 'model'"
            raise RequestError(message, "model", code="model_not_found", status=404)

    def choice_json(self, job: WebJob, choice: Continuation) -> Json:
        """JSON of a finished choice."""
        text = choice.echo + choice.stream.text
        content: Json = {"text": text}
        if job.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": choice.index, **content, "logprobs": self._scores_json(job, choice, 0), **_reason(choice)}

    def delta_json(self, job: WebJob, choice: Continuation, text: str, first: int) -> Json:
        """JSON of new text of a streamed choice; ``first``: number of its tokens reported before."""
        content: Json = {"delta": {"content": text}} if job.chat else {"text": text}
        return {"index": choice.index, **content, "logprobs": self._scores_json(job, choice, first), **_reason(choice)}

    def _scores_json(self, job: WebJob, choice: Continuation, first: int) -> Json | None:
        if choice.request.logprobs is None:
            return None
        tokens = choice.scores[first:]
        texts: list[str] = []
        begins: list[bool] = []
        for token, _ in tokens:
            # Answers of chats and prompts are texts of their own; other tokens continue a text.
            is_own = job.chat or choice.request.score_prompt
            begins.append(is_own and not choice.reported and not any(texts))
            texts.append(self._text(token, begins=begins[-1]))
        *offsets, choice.reported = accumulate(map(len, texts), initial=choice.reported)
        if job.chat:
            scores = [self._chat_score(*pair, begin) for pair, begin in zip(tokens, begins, strict=True)]
            return {"content": scores, "refusal": None}
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else score.logprob for _, score in tokens],
            "top_logprobs": [
                # Alternatives are in falling order: keep the likeliest of tokens with equal texts.
                None if score is None else {self._text(i): value for i, value in reversed(score.alternatives)}
                for _, score in tokens
            ],
            "text_offset": offsets,
        }

    def _chat_score(self, token: int, score: TokenScore | None, begins: bool) -> Json:
        assert score is not None, "only the first token of a prompt has no score, and chats do not score prompts"
        pairs = [(token, score.logprob), *score.alternatives]
        chosen, *more = ({"token": self._text(i, begins=begins), "logprob": value, "bytes": None} for i, value in pairs)
        return {**chosen, "top_logprobs": more}

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        if self.template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start with --chat-template FILE"
            )
        read = [message.model_dump(exclude_none=True) for message in messages]
        text = self._render(read)
        nameless = [{"role": message["role"], "content": message["content"]} for message in read]
        if nameless != read and self._render(nameless) == text:
            raise RequestError("the model's chat template does not use names of messages; remove 'name'", "messages")
        return self._tokens_of([text])[0]

    def _tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts, tokenized as a batch: only then do Hugging Face tokenizers release Python's lock."""
        return self.tokenizer.tokenize_batch(texts)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        assert self.template is not None
        try:
            return self.template.render(messages, seconds=TEMPLATE_SECONDS)
        except DataError as error:
            raise RequestError(str(error), "messages") from None

    def _prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        texts = map(self._begin, self._tokens_of([prompt for prompt in prompts if isinstance(prompt, str)]))
        tokens = [next(texts) if isinstance(prompt, str) else prompt for prompt in prompts]
        for prompt in tokens:
            if not prompt:
                raise RequestError("the prompt has no token; give at least one character", "prompt")
            if min(prompt) < 0 or max(prompt) >= self._vocab_size:
                largest = self._vocab_size - 1
                raise RequestError(f"the prompt has tokens outside of the vocabulary, 0 to {largest}", "prompt")
        return tokens

    def _new_tokens(self, request: ChatRequest | CompletionRequest, length: int) -> int:
        """Maximum number of new tokens; ``RequestError`` if prompt and new tokens exceed the context."""
        chat = isinstance(request, ChatRequest)
        context = self.limits.max_length
        name = "max_tokens"
        wanted = request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            name = "max_completion_tokens"
            wanted = request.max_completion_tokens
        room = context - length
        code = "context_length_exceeded"
        if room < (0 if wanted == 0 else 1):
            message = f"the prompt has {length} tokens; at most {context - 1} are possible"
            raise RequestError(message, "messages" if chat else "prompt", code=code)
        if wanted is None:
            return room if chat else min(COMPLETION_TOKENS, room)
        if wanted > room:
            message = (
                f"{name}={shown_value(wanted)} and the prompt's {length} tokens exceed the context of {context} tokens"
            )
            raise RequestError(f"{message}; give at most {room}", name, code=code, room=room)
        return wanted


def _reason(choice: Continuation) -> Json:
    return {"finish_reason": choice.finished}
