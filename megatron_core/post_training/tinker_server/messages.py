"""The protobuf messages of Tinker's API, with the field numbers of its client (tinker 0.38.0, tinker_public.proto).

Only requests of ``forward_backward`` and the answers with tensors travel as protobuf; everything else is JSON.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
from google.protobuf.message import DecodeError, Message

from megatron_core.errors import DataError
from megatron_core.text_file import read_table

PACKAGE = "tinker_public"
FLOAT32 = 1
DTYPES = {FLOAT32: np.float32, 2: np.int64, 3: np.int32}
STOP_REASONS = {"stop": 0, "length": 1}
MOST_CELLS = 2**26
"""Limit for the cells of a sparse matrix, which a few bytes can describe."""
ABSENT_LOGPROB = -99999.0
"""The log-probability in cells without a token, as the client documents it."""


def _message_types() -> dict[str, Any]:
    """The classes of the messages, from a pool of their own: the client's may be in the same process."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker_server.proto", package=PACKAGE, syntax="proto3")
    known_types = descriptor_pb2.FieldDescriptorProto
    for name, fields in read_table(__file__).items():
        message = file.message_type.add(name=name)
        for field in fields.split(",") if fields else ():
            number, field_name, type_name = field.split()
            added = message.field.add(name=field_name, number=int(number))
            added.label = known_types.LABEL_REPEATED if type_name.endswith("*") else known_types.LABEL_OPTIONAL
            type_name = type_name.rstrip("*")
            if type_name.islower():
                added.type = known_types.Type.Value(f"TYPE_{type_name.upper()}")
            else:
                added.type = known_types.TYPE_MESSAGE
                added.type_name = f".{PACKAGE}.{type_name}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}


MESSAGES = _message_types()


def forward_request(body: bytes) -> dict[str, Any]:
    """Read a request of ``forward_backward``: its fields, with the tokens and the tensors of each datum as lists.

    Errors: ``DataError`` for bytes, fields, chunks or tensors that are not supported, by name.
    """
    request = MESSAGES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        raise DataError("the request is not a protobuf message ForwardBackwardRequest") from None
    _refuse_unknown(request, "the request")
    settings: dict[str, float | str] = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        settings[entry.key] = entry.value.text or entry.value.number
    return {
        "model_id": request.model_id,
        "seq_id": request.seq_id,
        "loss_fn": request.loss_fn,
        "loss_fn_config": settings,
        "forward_only": request.forward_only,
        "data": [_datum(datum, f"datum {number}") for number, datum in enumerate(request.data)],
    }


def place_in_message(body: bytes) -> tuple[str, int]:
    """The training and the place of a request whose data may be illegal; "" and 0 for other bytes."""
    request = MESSAGES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        return "", 0
    return request.model_id, request.seq_id


def _datum(datum: Any, title: str) -> dict[str, Any]:
    _refuse_unknown(datum, title)
    for name in ("model_input_spans", "loss_fn_input_spans"):
        if len(getattr(datum, name)):
            raise DataError(f"{title}: {name} is not supported; leave it out")
    tokens: list[int] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            content = next((name for name in ("image", "dmel") if chunk.HasField(name)), "an empty chunk")
            raise DataError(f"{title}: model_input has {content}; only encoded_text is supported")
        tokens += _numbers(chunk.encoded_text.tokens, np.int32, title).tolist()
    inputs = {entry.key: _tensor(entry.value, f"{title}: {entry.key}") for entry in datum.loss_fn_inputs}
    return {"tokens": tokens, "inputs": inputs}


def _tensor(tensor: Any, title: str) -> list[Any]:
    """The numbers of a tensor: one for each token, or a row of K for each token."""
    if tensor.dtype not in DTYPES:
        raise DataError(f"{title} has dtype {tensor.dtype}; give float32, int64 or int32")
    dtype = DTYPES[tensor.dtype]
    shape = list(tensor.shape)
    if tensor.HasField("sparse_csr"):
        return _dense(tensor.sparse_csr, dtype, shape, title).tolist()
    numbers = _numbers(tensor.dense, dtype, title)
    shape = shape or [len(numbers)]
    if len(shape) > 2 or math.prod(shape) != len(numbers):
        raise DataError(f"{title} has the shape {shape}; give a number or a row of numbers for each token")
    return numbers.reshape(shape).tolist()


def _dense(sparse: Any, dtype: Any, shape: list[int], title: str) -> np.ndarray:
    """A matrix in compressed rows, with zeros in the other cells."""
    values = _numbers(sparse.values, dtype, title)
    starts = _numbers(sparse.crow_indices, np.int64, title)
    columns = _numbers(sparse.col_indices, np.int64, title)
    counts = np.diff(starts)
    if not (
        len(shape) == 2
        and 0 < math.prod(shape) <= MOST_CELLS
        and len(starts) == shape[0] + 1
        and starts[0] == 0
        and starts[-1] == len(values) == len(columns)
        and (counts >= 0).all()
        and ((columns >= 0) & (columns < shape[1])).all()
    ):
        raise DataError(f"{title} of the shape {shape} is not a matrix in compressed rows (CSR)")
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _numbers(data: bytes, dtype: Any, title: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise DataError(f"{title} has {len(data)} bytes, which are not numbers of {np.dtype(dtype).itemsize} bytes")
    return np.frombuffer(data, dtype=dtype)


def _refuse_unknown(message: Message, title: str) -> None:
    numbers = sorted({field.field_number for field in unknown_fields.UnknownFieldSet(message)})
    if numbers:
        raise DataError(f"{title} has fields that this server does not know, with the numbers {numbers}")


def forward_output(outputs: Mapping[str, Sequence[Sequence[Any]]], metrics: Mapping[str, float]) -> bytes:
    """Write the answer to ``forward_backward``; ``outputs``: numbers or rows of each datum's tokens, by name."""
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    answer.metrics.extend(MESSAGES["Number"](key=name, value=value) for name, value in metrics.items())
    record = answer.loss_fn_outputs.add(type_tag="ArrayRecord")
    for name, rows in outputs.items():
        record.num_datums = len(rows)
        entry = record.fields.add(key=name)
        arrays = [np.asarray(row, dtype=np.float32) for row in rows]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        entry.value.data = b"".join(array.tobytes() for array in arrays)
        entry.value.offsets = offsets.tobytes()
        entry.value.dtype = FLOAT32
        entry.value.trailing_shape.extend(arrays[0].shape[1:])
    return answer.SerializeToString()


def sample_output(result: Mapping[str, Any]) -> bytes:
    """Write the answer to ``asample``, from a result of ``RequestSampler``."""
    answer = MESSAGES["SampleResponse"]()
    for sequence in result["sequences"]:
        entry = answer.sequences.add(stop_reason=STOP_REASONS[sequence["stop_reason"]])
        entry.tokens = np.asarray(sequence["tokens"], dtype=np.int32).tobytes()
        entry.logprobs = np.asarray(sequence["logprobs"], dtype=np.float32).tobytes()
        if sequence["top"] is not None:
            _write_top(entry.topk_sampled_logprobs, sequence["top"])
    if result["prompt_logprobs"] is not None:
        answer.prompt_logprobs = np.asarray(
            [np.nan if value is None else value for value in result["prompt_logprobs"]], dtype=np.float32
        ).tobytes()
    if result["prompt_top"] is not None:
        _write_top(answer.topk_prompt_logprobs, result["prompt_top"])
    return answer.SerializeToString()


def _write_top(message: Any, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Most likely tokens of each position; a position without them has ``ABSENT_LOGPROB``."""
    width = max((len(row) for row in rows), default=0)
    tokens = np.zeros((len(rows), width), dtype=np.int32)
    log_probs = np.full((len(rows), width), ABSENT_LOGPROB, dtype=np.float32)
    for position, row in enumerate(rows):
        for rank, (token, log_prob) in enumerate(row):
            tokens[position, rank] = token
            log_probs[position, rank] = log_prob
    message.token_ids = tokens.tobytes()
    message.logprobs = log_probs.tobytes()
    message.k = width
    message.length = len(rows)
