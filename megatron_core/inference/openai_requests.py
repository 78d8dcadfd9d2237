"""Requests of OpenAI's completions and chat completions as pydantic models; unsupported parameters are refused."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from megatron_core.errors import DataError
from megatron_core.text_file import read_table

MOST_LOGPROBS = 20
MOST_STOPS = 4
MOST_STOP_TOKENS = 64
LONGEST_STOP = 1000
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Accepted parameters without effect on the text."""
NEUTRAL: dict[str, list[Any]] = read_table(__file__)
"""Unsupported parameters, with their accepted values besides null, which have no effect."""


class RequestError(DataError):
    """An illegal request: message, parameter, and OpenAI's error code if there is one.

    ``room``: the largest possible max_tokens, if a smaller one would make the request legal.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        status: int = 400,
        room: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
        self.room = room


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if value is not None}


class StreamOptions(_Model):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted; the server adds no random fields."""


class GenerationRequest(_Model):
    """Parameters common to both kinds of requests."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """-1, as in vLLM, or 0: all tokens."""
    ignore_eos: bool = False
    """Of vLLM: only ``max_tokens``, ``stop`` and ``stop_token_ids`` end the text."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_STOP_TOKENS)] = []
    """Of vLLM: tokens that end the text, as the tokenizer's end does."""
    stop: list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, content: Any) -> Any:
        """Remove parameters without effect, and refuse unsupported parameters."""
        if not isinstance(content, dict):
            return content
        for name, values in NEUTRAL.items():
            if content.get(name) is not None and content[name] not in values:
                fix = f"remove it, or give {shown_value(values[0])}" if values else "remove it"
                raise RequestError(f"{name}={shown_value(content[name])} is not supported; {fix}", name)
        return {key: value for key, value in content.items() if key not in NEUTRAL and key not in IGNORED}

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, stop: Any) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise RequestError(
                f"stop={shown_value(stop)}: give a string or a list of strings, none of them empty", "stop"
            )
        if len(stops) > MOST_STOPS:
            raise RequestError(f"stop has {len(stops)} strings; give at most {MOST_STOPS}", "stop")
        if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
            raise RequestError(f"stop has a string of {longest} characters; give at most {LONGEST_STOP}", "stop")
        return stops

    @model_validator(mode="after")
    def _options_of_streams(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true; add it, or remove stream_options", "stream_options")
        return self


class CompletionRequest(GenerationRequest):
    """A request for continuations of prompts."""

    prompt: list[str | list[int]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, prompt: Any) -> list[str | list[int]]:
        prompts = prompt if isinstance(prompt, list) and not _are_tokens(prompt) else [prompt]
        if not prompts or not all(isinstance(entry, str) or _are_tokens(entry) for entry in prompts):
            raise RequestError("prompt must be a string, a list of token ids, or a list of either", "prompt")
        return prompts

    @model_validator(mode="after")
    def _scores_are_not_streamed(self) -> "CompletionRequest":
        if self.stream and self.echo and self.logprobs is not None:
            raise RequestError("echo with logprobs is not streamed; remove stream", "stream")
        return self


class ChatMessage(_Model):
    """A message of a chat."""

    role: Literal["developer", "system", "user", "assistant"]  # not tool and function: tools are not supported
    content: str
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, content: Any) -> Any:
        """Remove empty parameters: clients return earlier answers with ``tool_calls: []``."""
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if value or key in ("role", "content")}

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        """Join a list of text parts."""
        if not isinstance(content, list):
            return content
        if not all(isinstance(section, dict) and section.keys() == {"type", "text"} for section in content) or not all(
            section["type"] == "text" and isinstance(section["text"], str) for section in content
        ):
            raise RequestError('content must be a string, or a list of {"type": "text", "text": ...}', "messages")
        return "".join(section["text"] for section in content)


class ChatRequest(GenerationRequest):
    """A request for answers to a chat."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _alternatives_need_scores(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true; add it, or remove top_logprobs", "top_logprobs")
        return self


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def read_request(model: type[AnyRequest], body: bytes) -> AnyRequest:
    """Parse ``body``; ``RequestError`` for the first fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    reason = fault.get("ctx", {}).get("error")
    if isinstance(reason, RequestError):
        raise reason
    kind_of_fault = fault["type"]
    where = fault["loc"]
    message = fault["msg"]
    param = str(where[0]) if where else None
    if kind_of_fault == "json_invalid":
        raise RequestError(f"the request is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if not where:
        raise RequestError("the request is not a JSON object")
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where).removeprefix(".")
    if kind_of_fault == "missing":
        raise RequestError(f"{name} is missing; add it", param)
    if kind_of_fault == "extra_forbidden":
        raise RequestError(f"{shown_value(name)} is not a parameter of this server; remove it", param)
    raise RequestError(f"{name}={shown_value(fault['input'])}: {message.replace('Input', 'it', 1)}", param)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(token) is int for token in value)


def shown_value(value: Any, most: int = 40) -> str:
    """Format a value for a message, shortened."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= most else text[:most] + "..."
    return repr(text) if isinstance(value, str) else text
