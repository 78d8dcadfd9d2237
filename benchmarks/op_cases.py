"""What bench_ops times: each fused operation as a function of its tensors, and the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron_core import ops
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy

EPSILON = 1e-5
SCALE = 0.125
P = 0.1


@dataclass(frozen=True)
class OpCase:
    """One operation as it is timed."""

    function: Callable
    """Takes the tensors and ``backend``; -> the output or a tuple of outputs."""
    inputs: Callable[[int, int, torch.dtype], list[Tensor]]
    """Its tensors for so many rows and columns of a dtype; gradients are wanted of those that require them."""
    op: str
    """The operation's name in ``ops.backend``."""
    moved: Callable[..., tuple[float, float]]
    """Of its tensors, what forward and backward have to move at least, in sizes of the first of them."""
    deciding: Callable[..., tuple] = lambda *tensors: ()
    """Of its tensors, the arguments that decide whether another library takes the call (``ops.backend``)."""
    limit: float = 0.8
    """What the time may be as a part of torch eager's."""
    eager: Callable | None = None
    """What a user of torch writes, of the same tensors, where the reference is slower; also what torch.compile gets."""


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose gradient is wanted."""
    return torch.randn(shape).to(dtype).requires_grad_()


def norm(function: Callable, op: str, *, parameters: int, limit: float = 0.8) -> OpCase:
    """A norm with so many parameters; it moves x and y, then dy, x and dx."""

    def inputs(length: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
        return [random(length, columns, dtype=dtype), *(random(columns, dtype=dtype) for _ in range(parameters))]

    def call(*tensors: Tensor, backend: str) -> Tensor:
        return function(*tensors, EPSILON, backend=backend)

    return OpCase(call, inputs, op, lambda *_: (2, 3), limit=limit)


def eager_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """softmax(SCALE * scores) over what is not masked, as users of PyTorch write it."""
    return (scores * SCALE).masked_fill(mask, -torch.inf).softmax(-1)


def softmax(*, causal: bool) -> OpCase:
    """Softmax of rows x columns scores: heads of square matrices where there are more rows than columns, else one head
    whose queries are the last of so many. The native kernel needs no mask for the triangle; the others' is made before
    the clock starts. The other mask hides every second hundred keys."""

    def inputs(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
        queries = min(rows, columns)
        key, query = torch.arange(columns), torch.arange(columns - queries, columns)[:, None]
        mask = key > query if causal else key // 100 % 2 != query // 100 % 2
        return [random(rows // queries, queries, columns, dtype=dtype), mask]

    def function(scores: Tensor, mask: Tensor, *, backend: str) -> Tensor:
        if backend == "reference":
            return eager_softmax(scores, mask)
        return ops.attention_softmax(scores, None if causal else mask, scale=SCALE, causal=causal, backend=backend)

    def moved(scores: Tensor, mask: Tensor) -> tuple[float, float]:
        """The triangle's hidden scores need not be read, but all results are written; a mask is of bytes."""
        read = 1 - mask.float().mean().item() if causal else 1.0
        read_mask = 0.0 if causal else mask.nbytes / scores.nbytes
        return read + read_mask + 1, 2 * read + 1

    def deciding(scores: Tensor, mask: Tensor) -> tuple:
        return scores, None if causal else mask, causal, None

    return OpCase(function, inputs, "softmax", moved, deciding)


def rope(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Heads of 128 channels, one row a position; the tables, and what ``eager_rope`` takes in their place."""
    angles = torch.arange(rows)[:, None, None] * 10_000.0 ** -(torch.arange(64) / 64)
    tables = angles.cos(), angles.sin()
    doubled = (torch.cat([table, table], dim=-1).to(dtype).unsqueeze(-2) for table in tables)
    return [random(rows, 1, columns // 128, 128, dtype=dtype), *tables, *doubled]


def eager_rope(x: Tensor, _: Tensor, __: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As it is written everywhere: tables twice as wide, in the type of ``x``."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def bias_dropout_add(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """x, bias and residual of one sequence, and its number."""
    x, residual = (random(rows, 1, columns, dtype=dtype) for _ in range(2))
    return [x, random(columns, dtype=dtype), residual, torch.tensor([3])]


def cross_entropy(logits: Tensor, target: Tensor, *, backend: ops.Backend) -> Tensor:
    """Losses of whole logits."""
    return vocab_parallel_cross_entropy(logits, target, tp_group=LocalGroup(), backend=backend)


def eager_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """As PyTorch's users write it."""
    return functional.cross_entropy(logits.float(), target, reduction="none")


def logits_and_target(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a cross entropy."""
    return [random(rows, columns, dtype=dtype), torch.randint(columns, (rows,))]


def activation(kind: str) -> OpCase:
    """A bias and an activation of so many columns, those of a gate's value among them."""

    def inputs(length: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
        return [random(length, columns, dtype=dtype), random(columns, dtype=dtype)]

    def function(x: Tensor, bias: Tensor, *, backend: str) -> Tensor:
        return ops.bias_activation(x, bias, kind, backend=backend)

    out = 0.5 if kind in ("swiglu", "geglu") else 1.0
    return OpCase(function, inputs, "activation", lambda *_: (1 + out, 2 + out), lambda x, _: (x, kind))


CASES = {
    "rms_norm": norm(ops.rms_norm, "rms_norm", parameters=1),
    "layer_norm": norm(ops.layer_norm, "layer_norm", parameters=2, limit=1.0),  # eager does it in one pass too
    "causal_softmax": softmax(causal=True),
    "masked_softmax": softmax(causal=False),
    "rope": OpCase(
        lambda x, cos, sin, *_, backend: ops.rope(x, cos, sin, backend=backend),
        rope,
        "rope",
        lambda x, cos, *_: (2 + 2 * cos.nbytes / x.nbytes, 2 + 2 * cos.nbytes / x.nbytes),
        lambda x, cos, sin, *_: (x, cos, sin, False),
        eager=eager_rope,
    ),
    "bias_dropout_add": OpCase(
        lambda x, bias, residual, sample, backend: ops.bias_dropout_add(
            x, bias, residual, P, 1, sample, backend=backend
        ),
        bias_dropout_add,
        "dropout",
        lambda *_: (3, 2),  # the residual's gradient is the output's
        eager=lambda x, bias, residual, sample: residual + functional.dropout(x + bias, P),
    ),
    "cross_entropy": OpCase(
        cross_entropy, logits_and_target, "cross_entropy", lambda *_: (1, 2), eager=eager_cross_entropy
    ),
    "bias_gelu": activation("gelu"),
    "bias_gelu_tanh": activation("gelu_tanh"),
    "bias_squared_relu": activation("squared_relu"),
    "bias_swiglu": activation("swiglu"),
    "bias_geglu": activation("geglu"),
}
