"""The JSON requests of Tinker's API as pydantic models; fields that are not supported are refused by name."""

import re
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_core.errors import DataError
from megatron_core.post_training.tinker_server.messages import place_in_message

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PATH = re.compile(rf"tinker://([0-9a-f]+:train:[0-9]+)/(weights|sampler_weights)/({NAME.pattern})")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    type: str | None = None
    """The name of the request, which the path gives already."""


class CreateSession(_Body):
    """A new session; its tags and project are not kept."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(_Body):
    """A sign of life of a session."""

    session_id: str


class LoraConfig(_Body):
    """The adapters of a training."""

    rank: int = Field(ge=0)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(_Body):
    """The optimizer of a training."""

    type: Literal["adamw"] = "adamw"


class CreateModel(_Body):
    """A new training."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class OfModel(_Body):
    """A request about a training."""

    model_id: str


class AdamParams(_Body):
    """The settings of one step of AdamW; a ``grad_clip_norm`` of 0 does not clip."""

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(OfModel):
    """A step of the optimizer."""

    adam_params: AdamParams
    seq_id: int | None = None


class SaveWeights(OfModel):
    """A checkpoint to train on; it does not expire."""

    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    """Weights to sample with: a checkpoint with a name, or a copy in memory without one."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(_Body):
    """Stored weights into a training, which is new if the request names a session."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerChoice | None = None


class CreateSampler(_Body):
    """A session that samples with stored weights, or with the base model."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class EncodedText(_Body):
    """Tokens of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class Prompt(_Body):
    """A prompt of texts; images are not supported."""

    chunks: list[EncodedText]


class SamplingParams(_Body):
    """The settings of a sample; a ``top_k`` of -1 is all tokens."""

    max_tokens: int | None = Field(None, ge=0)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(_Body):
    """Samples of a prompt."""

    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Prompt
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(0, ge=0, le=64)
    topk_sample_logprobs: int = Field(0, ge=0, le=64)
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: Literal[False] = False


class Retrieve(_Body):
    """The result of an earlier request; results are always sent whole."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(_Body):
    """A question about stored weights."""

    tinker_path: str


Body = TypeVar("Body", bound=BaseModel)


def read_body(model: type[Body], body: bytes) -> Body:
    """Read a request; ``DataError`` with the names of all faults."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        faults = []
        for fault in error.errors(include_url=False, include_context=False, include_input=False):
            field = ".".join(str(step) for step in fault["loc"])
            what = "is not supported" if fault["type"] == "extra_forbidden" else fault["msg"]
            faults.append(f"{field}: {what}" if field else what)
        raise DataError("; ".join(faults[:8])) from None


def model_and_number(body: bytes) -> tuple[str, int]:
    """The training and the place of a request that may be illegal; "" and 0 if it names none."""
    try:
        content = orjson.loads(body)
        model = content["model_id"]
        seq_id = content["seq_id"]
        return (model, seq_id) if isinstance(model, str) and isinstance(seq_id, int) else ("", 0)
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return place_in_message(body)


def checked_name(name: str | None) -> str:
    """The name of weights, which becomes that of a folder."""
    if name is None or NAME.fullmatch(name) is None:
        raise DataError(f"path={name!r} must be a name of letters, digits, '.', '_' and '-', at most 128 characters")
    return name


def checked_path(path: str) -> str:
    """A path of stored weights."""
    if PATH.fullmatch(path) is None:
        raise DataError(f"{path!r} is not a path of this server, such as tinker://RUN/weights/NAME")
    return path
