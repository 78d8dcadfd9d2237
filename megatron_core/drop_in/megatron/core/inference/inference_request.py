"""Requests to an engine with their results, and their serialized forms."""

import copy
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron.core.inference.inference_event import DynamicInferenceEvent, DynamicInferenceEventType
from megatron.core.inference.sampling_params import SamplingParams

RequestKind = TypeVar("RequestKind", bound="InferenceRequest")
Status = Enum(
    "Status", "WAITING_IN_QUEUE ACTIVE_AND_GENERATING_TOKENS ACTIVE_BUT_NOT_GENERATING_TOKENS COMPLETED FAILED"
)
"""State of a request."""


def serialize_tensor(tensor: Tensor) -> list[Any]:
    """Return the elements as nested lists."""
    return tensor.tolist()


def deserialize_tensor(tensor_as_list: list[Any]) -> Tensor:
    """Return the tensor of nested lists."""
    return torch.tensor(tensor_as_list)


def serialize_ndarray(arr: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the elements and the dtype."""
    return {"data": arr.tolist(), "dtype": str(arr.dtype)}


def deserialize_ndarray(obj: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the array of ``serialize_ndarray``."""
    return np.array(obj["data"], dtype=np.dtype(obj["dtype"]))


def _is_wrapped(value: Any, kind: str) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] == kind


def unwrap_serialized_tensors(serialized_request: dict[str, Any]) -> dict[str, Any]:
    """Return a serialized request with tensors as plain lists."""
    return {name: value[1] if _is_wrapped(value, "tensor") else value for name, value in serialized_request.items()}


def compute_block_hashes_batched(prompt_tokens: Tensor, block_size: int) -> list[int]:
    """Return a hash for each complete block of ``prompt_tokens`` ``[s]``, which depends on all tokens up to its end.

    d_i = SHA-256(d_(i-1) | tokens of block i as int64), d_(-1) = 0; the hash is 1 + (first 8 bytes of d_i, little
    endian) mod (2^63 - 1).
    """
    blocks = prompt_tokens[: len(prompt_tokens) // block_size * block_size].to(torch.int64).cpu().view(-1, block_size)
    digest, hashes = bytes(32), []
    for block in blocks:
        digest = hashlib.sha256(digest + block.numpy().tobytes()).digest()
        hashes.append(1 + int.from_bytes(digest[:8], "little") % (2**63 - 1))
    return hashes


@dataclass(kw_only=True)
class InferenceRequest:
    """A prompt, the settings of its continuation, and the results."""

    request_id: int
    prompt: str
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None
    prompt_tokens: Any = None
    prompt_length: int | None = None
    arrival_time: float | None = None
    status: Status | None = None
    encoder_prompt: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: list[int] | None = None
    generated_tokens: Any = None
    prompt_log_probs: Any = None
    generated_log_probs: Any = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    generated_length: int | None = None
    tpot: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.sampling_params is None and self.inference_parameters is not None:
            warnings.warn("inference_parameters is deprecated; give sampling_params", stacklevel=3)
            self.sampling_params = self.inference_parameters

    def serialize(self) -> dict[str, Any]:
        """Return the fields as plain values; a tensor becomes ("tensor", nested lists)."""
        plain = dict(vars(self))
        plain["status"] = self.status.name if self.status else None
        for name in ("sampling_params", "inference_parameters"):
            given: SamplingParams | None = plain[name]
            plain[name] = given.serialize() if given else None
        for name, value in plain.items():
            if isinstance(value, Tensor):
                plain[name] = ("tensor", serialize_tensor(value))
            elif isinstance(value, np.ndarray):
                plain[name] = ("ndarray", serialize_ndarray(value))
        return plain

    @classmethod
    def deserialize(cls: type[RequestKind], obj: dict[str, Any]) -> RequestKind:
        """Return the request of ``serialize``."""
        request = cls(**obj)
        request._post_deserialize(obj)
        return request

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        self.status = None if obj["status"] is None else Status[obj["status"]]
        for name in ("sampling_params", "inference_parameters"):
            setattr(self, name, None if obj[name] is None else SamplingParams.deserialize(obj[name]))
        for name, value in obj.items():
            if _is_wrapped(value, "tensor"):
                setattr(self, name, deserialize_tensor(value[1]))
            elif _is_wrapped(value, "ndarray"):
                setattr(self, name, deserialize_ndarray(value[1]))


def _adder(kind: DynamicInferenceEventType) -> Callable[..., DynamicInferenceEvent]:
    def add(self: "DynamicInferenceRequest", *error: Exception) -> DynamicInferenceEvent:
        return self.add_event(kind, *error)

    add.__doc__ = f"Record an event {kind.name}; events of errors take the error."
    return add


@dataclass(kw_only=True)
class DynamicInferenceRequest(InferenceRequest):
    """A request to ``DynamicInferenceEngine``; ``generated_tokens`` and log probabilities are lists.

    ``ttft`` is the time to the first token, ``tpot`` the time of each token and ``latency`` that of the whole request,
    in seconds.
    """

    prompt: str | None = None  # type: ignore[assignment]
    prompt_tokens: Tensor | None = None
    remaining_prompt_tokens: Tensor | None = None
    policy_epoch: list[tuple[int, int]] | None = None
    kv_cache_epoch: list[tuple[int, int]] | None = None
    latency: float | None = None
    routing_indices: np.ndarray[Any, Any] | None = None
    finished_chunk_token_count: int = 0
    stop_word_ids: list[list[int]] | None = None
    cg_wait_iters: int = 0
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    num_cached_tokens: int = 0
    precomputed_block_hashes: list[int] = field(default_factory=list)
    ttft: float | None = None
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    event_add_engine: DynamicInferenceEvent | None = field(default=None, repr=False)
    generated_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampling_params = copy.deepcopy(self.sampling_params)
        if self.prompt_tokens is None:
            return
        self.remaining_prompt_tokens = self.prompt_tokens
        if self.enable_prefix_caching and self.block_size_tokens is not None and not self.precomputed_block_hashes:
            self.precomputed_block_hashes = compute_block_hashes_batched(self.prompt_tokens, self.block_size_tokens)

    @property
    def remaining_prompt_length(self) -> int:
        """The number of tokens of the prompt that are not computed yet."""
        return 0 if self.remaining_prompt_tokens is None else len(self.remaining_prompt_tokens)

    def __str__(self) -> str:
        status = "[NOT ADDED]" if self.status is None else self.status.name
        length = 0 if self.prompt_tokens is None else len(self.prompt_tokens)
        return (
            f"id {self.request_id}, {status}, prompt len {length}, gen len {len(self.generated_tokens)}, "
            f"num events {len(self.events)}"
        )

    def serialize(self) -> dict[str, Any]:
        """Return the fields as plain values, without the prompt's tokens unless ``return_prompt_tokens`` is set."""
        tokens, settings = self.prompt_tokens, self.sampling_params
        keeps = settings is None or settings.return_prompt_tokens
        plain = super().serialize()
        del plain["event_add_engine"]
        if not keeps:
            plain["prompt_tokens"] = None
        length = None if tokens is None else len(tokens)
        return plain | {"events": [event.serialize() for event in self.events], "prompt_length": length}

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        super()._post_deserialize(obj)
        self.events = [DynamicInferenceEvent.deserialize(event) for event in obj.get("events", [])]

    @staticmethod
    def get_metadata_types() -> list[tuple[str, torch.dtype]]:
        """Return the settings of sampling that a step reads, with their dtypes."""
        return [
            ("temperature", torch.float32),
            ("top_k", torch.int32),
            ("top_p", torch.float32),
            ("termination_id", torch.int64),
            ("return_log_probs", torch.bool),
            ("skip_prompt_log_probs", torch.bool),
            ("top_n_logprobs", torch.int32),
        ]

    @property
    def tracked_metadata(self) -> list[Any]:
        """The values of ``get_metadata_types``; a missing ``termination_id`` becomes -1."""
        assert self.sampling_params is not None, "the request has no sampling_params"
        if self.sampling_params.termination_id is None:
            self.sampling_params.termination_id = -1
        return [getattr(self.sampling_params, name) for name, _ in self.get_metadata_types()]

    def add_event(self, type: DynamicInferenceEventType, payload: Any = None) -> DynamicInferenceEvent:
        """Record an event."""
        event = DynamicInferenceEvent(type=type, payload=payload)
        self.events.append(event)
        return event

    def add_event_add_engine(self) -> DynamicInferenceEvent:
        """Record the arrival of the request."""
        self.event_add_engine = self.add_event(DynamicInferenceEventType.ADD_ENGINE)
        return self.event_add_engine

    def add_event_generated_token(self, token: int, **counts: int | None) -> DynamicInferenceEvent:
        """Record a token, with counts of blocks and steps that are given."""
        given = {name: value for name, value in counts.items() if value is not None}
        return self.add_event(DynamicInferenceEventType.GENERATED_TOKEN, {"token_id": token} | given)

    add_event_add_context = _adder(DynamicInferenceEventType.ADD_CONTEXT)
    add_event_pause = _adder(DynamicInferenceEventType.PAUSE)
    add_event_evict = _adder(DynamicInferenceEventType.EVICT)
    add_event_finish = _adder(DynamicInferenceEventType.FINISH)
    add_event_fail = _adder(DynamicInferenceEventType.FAIL)
    add_event_error_transient = _adder(DynamicInferenceEventType.ERROR_TRANSIENT)
    add_event_error_nontransient = _adder(DynamicInferenceEventType.ERROR_NONTRANSIENT)

    def succeeded(self) -> bool:
        """Return whether the request is complete."""
        return self.status == Status.COMPLETED

    def failed(self) -> bool:
        """Return whether the request has failed."""
        return self.status == Status.FAILED


_JOINED = ("generated_tokens", "generated_log_probs", "generated_top_n_logprobs", "tpot", "events")
_OF_FIRST = (
    *("request_id", "prompt", "prompt_tokens", "prompt_log_probs", "prompt_top_n_logprobs", "sampling_params", "ttft"),
    *("block_size_tokens", "enable_prefix_caching", "precomputed_block_hashes", "num_cached_tokens"),
)
_OF_LAST = ("policy_epoch", "kv_cache_epoch", "status")


@dataclass(kw_only=True)
class DynamicInferenceRequestRecord:
    """A request and its continuations after interruptions; ``merge`` makes one request of them."""

    requests: list[DynamicInferenceRequest] = field(default_factory=list)
    latency: float | None = None

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> "DynamicInferenceRequestRecord":
        """Return the record of a new request."""
        return cls(requests=[request])

    def __getitem__(self, idx: int) -> DynamicInferenceRequest:
        return self.requests[idx]

    @property
    def request_id(self) -> int:
        """The number of the request."""
        return self.requests[0].request_id

    def checkpoint(self, tokenizer: Any = None) -> None:
        """Append a request whose prompt has the tokens generated so far, for the rest of the tokens."""
        old = self[-1]
        assert old.prompt_tokens is not None and old.sampling_params is not None, "the request has no prompt"
        tokens = torch.cat([old.prompt_tokens, old.prompt_tokens.new_tensor(old.generated_tokens)])
        number = old.sampling_params.num_tokens_to_generate
        rest = None if number is None else number - len(old.generated_tokens)
        new = DynamicInferenceRequest(
            request_id=old.request_id,
            prompt_tokens=tokens,
            sampling_params=old.sampling_params.replaced(num_tokens_to_generate=rest),
            policy_epoch=old.policy_epoch,
        )
        if old.event_add_engine is None:
            new.add_event_add_engine()
        else:
            new.event_add_engine = old.event_add_engine
        self.requests.append(new)

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """Return one request with the results of all."""
        first, last = self.requests[0], self.requests[-1]
        joined = {name: self._joined(name) for name in _JOINED}
        texts = [request.generated_text for request in self.requests]
        routing = [request.routing_indices for request in self.requests if request.routing_indices is not None]
        return DynamicInferenceRequest(
            **{name: getattr(first, name) for name in _OF_FIRST},
            **{name: getattr(last, name) for name in _OF_LAST},
            **joined,
            generated_text=None if None in texts else "".join(map(str, texts)),
            generated_length=len(joined["generated_tokens"]),
            latency=self.latency,
            routing_indices=np.concatenate(routing) if routing else None,
        )

    def _joined(self, name: str) -> Any:
        if getattr(self.requests[0], name) is None:
            return None
        return [value for request in self.requests for value in getattr(request, name)]

    def serialize(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"requests": [request.serialize() for request in self.requests], "latency": self.latency}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> "DynamicInferenceRequestRecord":
        """Return the record of ``serialize``."""
        requests = [DynamicInferenceRequest.deserialize(each) for each in obj["requests"]]
        return cls(requests=requests, latency=obj["latency"])


@dataclass(kw_only=True)
class VLMInferenceRequest(InferenceRequest):
    """A request with images, for annotations; no model here takes images."""

    num_img_embeddings_per_tile: int
    imgs: Tensor
    num_tiles: Tensor
    decoder_seq_length: int
