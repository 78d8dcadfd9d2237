"""Cases of bench_ops: each fused operation as a function of its tensors, and the tensors."""

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
    """One operation to time."""

    function: Callable
    """Takes the tensors and ``backend``; returns the output or a tuple of outputs."""
    inputs: Callable[[int, int, torch.dtype], list[Tensor]]
    """Creates the tensors for the given rows, columns and dtype; gradients are computed for those that require them."""
    op: str
    """The operation's name in ``ops.backend``."""
    moved: Callable[..., tuple[float, float]]
    """The minimal traffic of forward and backward for the tensors, in sizes of the first one."""
    deciding: Callable[..., tuple] = lambda *tensors: ()
    """The arguments that determine whether another library supports the call (``ops.backend``)."""
    limit: float = 0.8
    """Target of the time relative to torch eager."""
    eager: Callable | None = None
    """The usual PyTorch code for the same tensors, if the reference is slower; also compiled by torch.compile."""


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor that requires a gradient."""
    return torch.randn(shape).to(dtype).requires_grad_()


def norm(function: Callable, op: str, *, parameters: int, limit: float = 0.8) -> OpCase:
    """A norm with the given number of parameters; it moves x and y, then dy, x and dx."""

    def inputs(length: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
        return [random(length, columns, dtype=dtype), *(random(columns, dtype=dtype) for _ in range(parameters))]

    def call(*tensors: Tensor, backend: str) -> Tensor:
        return function(*tensors, EPSILON, backend=backend)

    return OpCase(call, inputs, op, lambda *_: (2, 3), limit=limit)


def eager_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """softmax(SCALE * scores) with a mask, in the usual PyTorch code."""
    return (scores * SCALE).masked_fill(mask, -torch.inf).softmax(-1)


def softmax(*, causal: bool) -> OpCase:
    """Softmax of rows x columns scores: heads of square matrices if there are more rows than columns, else one head
    with the last queries. The native causal softmax needs no mask; the others' is created before the timing. The other
    mask hides every second hundred keys."""

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
        """Scores hidden by the causal mask need not be read, but all results are written; a mask has one byte per
        element."""
        read = 1 - mask.float().mean().item() if causal else 1.0
        read_mask = 0.0 if causal else mask.nbytes / scores.nbytes
        return read + read_mask + 1, 2 * read + 1

    return OpCase(function, inputs, "softmax", moved)


def rope(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Heads of 128 channels, one row per position; the tables, and those of ``eager_rope``."""
    angles = torch.arange(rows)[:, None, None] * 10_000.0 ** -(torch.arange(64) / 64)
    tables = angles.cos(), angles.sin()
    doubled = (torch.cat([table, table], dim=-1).to(dtype).unsqueeze(-2) for table in tables)
    return [random(rows, 1, columns // 128, 128, dtype=dtype), *tables, *doubled]


def eager_rope(x: Tensor, _: Tensor, __: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The usual code: tables twice as wide, in the dtype of ``x``."""
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
    """The usual PyTorch code."""
    return functional.cross_entropy(logits.float(), target, reduction="none")


def logits_and_target(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a cross entropy."""
    return [random(rows, columns, dtype=dtype), torch.randint(columns, (rows,))]


def activation(kind: str) -> OpCase:
    """A bias and an activation with this many columns, including those of the gate."""

    def inputs(length: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
        return [random(length, columns, dtype=dtype), random(columns, dtype=dtype)]

    def function(x: Tensor, bias: Tensor, *, backend: str) -> Tensor:
        return ops.bias_activation(x, bias, kind, backend=backend)

    out = 0.5 if kind in ("swiglu", "geglu") else 1.0
    return OpCase(function, inputs, "activation", lambda *_: (1 + out, 2 + out), lambda x, _: (x, kind))


CASES = {
    "rms_norm": norm(ops.rms_norm, "rms_norm", parameters=1),
    "layer_norm": norm(ops.layer_norm, "layer_norm", parameters=2, limit=1.0),  # eager also does it in one pass
    "causal_softmax": softmax(causal=True),
    "masked_softmax": softmax(causal=False),
    "rope": OpCase(
        lambda x, cos, sin, *_, backend: ops.rope(x, cos, sin, backend=backend),
        rope,
        "rope",
        lambda x, cos, *_: (2 + 2 * cos.nbytes / x.nbytes, 2 + 2 * cos.nbytes / x.nbytes),
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
