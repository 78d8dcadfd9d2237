"""Events in the life of a request."""

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

DynamicInferenceEventType = Enum(
    "DynamicInferenceEventType",
    "ADD_ENGINE ADD_CONTEXT GENERATED_TOKEN PAUSE EVICT FINISH FAIL ERROR_TRANSIENT ERROR_NONTRANSIENT",
)
"""Kind of an event in the life of a request."""
_ERRORS = (DynamicInferenceEventType.ERROR_TRANSIENT, DynamicInferenceEventType.ERROR_NONTRANSIENT)


@dataclass(kw_only=True)
class DynamicInferenceEvent:
    """An event: its time in seconds, kind, and payload, which errors and generated tokens have."""

    timestamp: float | None = None
    type: DynamicInferenceEventType
    payload: Any = None

    def __post_init__(self) -> None:
        if self.timestamp is None:
            self.timestamp = time.time()
        assert isinstance(self.type, DynamicInferenceEventType), (
            f"type={self.type!r} is not a DynamicInferenceEventType"
        )
        if self.type in _ERRORS:
            assert self.payload is not None, f"an event {self.type.name} needs the error as payload"
        elif self.type == DynamicInferenceEventType.GENERATED_TOKEN:
            has_token = isinstance(self.payload, dict) and "token_id" in self.payload
            assert has_token, f"payload={self.payload!r} of a generated token has no token_id"
        else:
            assert self.payload is None, f"an event {self.type.name} has no payload"

    def __str__(self) -> str:
        text = ""
        if self.type == DynamicInferenceEventType.GENERATED_TOKEN:
            text = f", token={self.payload['token_id']}"
        elif self.payload is not None:
            text = f", {type(self.payload).__name__}"
        return f"[{self.timestamp:.3f}] {self.type.name}{text}"

    def serialize(self) -> dict[str, Any]:
        """Return the fields as plain values; an error becomes the text of its type and message."""
        payload = self.payload
        if self.type in _ERRORS:
            payload = {"type": type(payload).__name__, "message": str(payload)}
        return {"timestamp": self.timestamp, "type": self.type.name, "payload": payload}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> "DynamicInferenceEvent":
        """Return the event of ``serialize``; an error becomes a ``RuntimeError``."""
        kind, payload = DynamicInferenceEventType[obj["type"]], obj["payload"]
        if kind in _ERRORS:
            payload = RuntimeError(f"{payload['type']}: {payload['message']}")
        return cls(timestamp=obj["timestamp"], type=kind, payload=payload)
