"""Addition of a bias, dropout and addition of the residual in one pass; native kernels as torch operators."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference
from megatron_core.ops.backend import Backend, select_backend
from megatron_core.ops.operator import define, operator
from megatron_core.ops.reference import dropout_scale, dropout_threshold
from megatron_core.ops.rows import check_rows, contiguous_last_dim, new_like, partials


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int = 0,
    sample_index: Tensor | None = None,
    position_ids: Tensor | None = None,
    key_positions: Tensor | None = None,
    first_head: int = 0,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """y = residual + keep (x + bias) / (1 - p); keep is a function of an element's global position and of ``key``.

    ``x`` and ``residual`` are activations ``[s, b, h]``, or attention weights ``[b, heads, s, t]`` whose first head is
    ``first_head``; ``bias`` is ``[h]`` or ``[t]``. ``sample_index`` ``[b]`` are the global indices of the sequences; it
    is optional if p is 0. ``position_ids`` ``[s]`` or ``[b, s]`` are the global positions of the rows,
    ``key_positions`` ``[t]`` the positions of the keys of attention weights, in any order; None means 0, 1, 2, ....
    All three are int64.
    """
    # All backends use the same bits (``reference.random_bits``), and round p to a multiple of 2^-16, so that a run may
    # continue with another backend. For backward the CPU kernel saves one bit per element, because drawing again would
    # take longer than reading it; a GPU has arithmetic to spare, and its kernel saves nothing.
    if not 0 <= p < 1:
        raise ConfigError(f"dropout: p={p}; it must be >= 0 and < 1")
    # An addition alone: torch's is as fast, and it needs no numbers of samples.
    if p == 0 and bias is None:
        return x if residual is None else residual + x
    arguments = (x, bias, residual, p, key, sample_index, position_ids, key_positions, first_head)
    if select_backend("dropout", backend, x.device.type, x.dtype) == "reference":
        _check(x, bias, residual, p, sample_index, position_ids, key_positions)
        # One operator for the whole mask, which a graph stores as a node.
        draw = _keep if torch.compiler.is_compiling() else reference.keep
        return reference.bias_dropout_add(*arguments, draw=draw)
    return _bias_dropout_add(*arguments)[0]


def _check(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, *numbers: Tensor | None) -> None:
    if x.dim() not in (3, 4):
        raise ConfigError(f"dropout: x is {list(x.shape)}; it must be [s, b, h] or attention's [b, heads, s, t]")
    check_rows("dropout", x, {"residual": residual}, **({} if bias is None else {"bias": bias}))
    if p == 0:
        return
    sample_index, position_ids, key_positions = numbers
    if sample_index is None:
        raise ConfigError("dropout above 0 needs sample_index: pass the batch's global sample numbers to forward")
    length, batch, _ = _of_rows(x.shape, 1)
    _check_numbers("sample_index", sample_index, x, (batch,))
    if position_ids is not None:
        _check_numbers("position_ids", position_ids, x, (length,) if position_ids.dim() == 1 else (batch, length))
    if key_positions is not None:
        if x.dim() == 3:
            raise ConfigError("dropout: key_positions are for attention weights [b, heads, s, t]; x is [s, b, h]")
        _check_numbers("key_positions", key_positions, x, x.shape[-1:])


def _check_numbers(name: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.int64 or tensor.device != x.device:
        raise ConfigError(
            f"dropout: {name} is {list(tensor.shape)} of {tensor.dtype} on {tensor.device}; "
            f"for x {list(x.shape)} on {x.device} it must be {list(shape)} of torch.int64 there"
        )


@define("dropout_keep")
def _keep(
    shape: Sequence[int],
    p: float,
    key: int,
    sample_index: Tensor,
    position_ids: Tensor | None,
    key_positions: Tensor | None,
    first_head: int,
) -> Tensor:
    """``reference.keep`` in graphs of torch.compile, whose C++ for operations on bits of integers does not compile if
    the key is a symbol (torch 2.13)."""
    return reference.keep(tuple(shape), p, key, sample_index, position_ids, key_positions, first_head)


@operator("bias_dropout_add")
def _bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    sample_index: Tensor | None,
    position_ids: Tensor | None,
    key_positions: Tensor | None,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    """-> (y, the mask's bits for backward, which may be empty)."""
    mask_bits = _room_for_kept(x, p)
    numbers = (sample_index, position_ids, key_positions)
    return _run(x, bias, residual, p, key, numbers, first_head, mask_bits, draws=True), mask_bits


@operator("bias_dropout_add_backward")
def _bias_dropout_add_backward(
    dy: Tensor,
    p: float,
    key: int,
    sample_index: Tensor,
    position_ids: Tensor | None,
    key_positions: Tensor | None,
    first_head: int,
    mask_bits: Tensor,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """-> (dx, dbias); dbias is empty unless ``sums``."""
    total = _sums_of(dy, sums)
    numbers = (sample_index, position_ids, key_positions)
    arguments = dy, None, None, p, key, numbers, first_head, mask_bits
    return _run(*arguments, draws=False, sums=total if sums else None), total


def _run(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    numbers: tuple[Tensor | None, ...],
    first_head: int,
    mask_bits: Tensor,
    *,
    draws: bool,
    sums: Tensor | None = None,
) -> Tensor:
    """-> y; the sum of its rows is written to ``sums``."""
    _check(x, bias, residual, p, *numbers)
    y = new_like(x)
    partial = None if sums is None else partials(x, 1)
    samples, positions, keys = (None if p == 0 or tensor is None else tensor.contiguous() for tensor in numbers)
    positions_stride = 0 if positions is None or positions.dim() == 1 else positions.shape[1]
    native.call(
        "dropout",
        x,
        *(*_of_rows(x.shape, 1), x.shape[-1], *_by_rows(x)),
        *(None if bias is None else bias.contiguous(), *_by_rows(residual)),
        *(dropout_threshold(p), dropout_scale(p), key, samples, positions, positions_stride, keys, first_head),
        *((mask_bits, draws) if len(mask_bits) else (None, False)),
        *(*_by_rows(y), sums, partial, 0 if partial is None else len(partial)),
    )
    return y


def _by_rows(x: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """``x`` with contiguous channels (copied if necessary), and its strides of position, sample and head."""
    if x is None:
        return None, 0, 0, 0
    x = contiguous_last_dim(x)
    return x, *_of_rows(x.stride(), 0)


def _of_rows(extents: tuple[int, ...], no_head: int) -> tuple[int, int, int]:
    """Sizes or strides of position, sample and head, from those of ``[s, b, h]`` or ``[b, heads, s, t]``."""
    if len(extents) == 3:
        return extents[0], extents[1], no_head
    sample, head, position, _ = extents
    return position, sample, head


def _room_for_kept(x: Tensor, p: float) -> Tensor:
    """Allocate one bit per element if the library saves the mask, with rows padded as in csrc/common/dropout.h."""
    # The library says whether it stores the mask, because CPU and CUDA kernels differ.
    padding = native.library(x.device.type, x.dtype).megatron_dropout_kept() if dropout_threshold(p) else 0
    row = -(-x.shape[-1] // padding) * padding // 8 if padding else 0
    return x.new_empty(math.prod(x.shape[:-1]) * row, dtype=torch.uint8)


def _sums_of(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape[-1:] if wanted else 0)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, _, _, ctx.p, ctx.key, *numbers, ctx.first_head = inputs
    ctx.save_for_backward(*numbers, output[1])


def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    of_x, of_bias, of_residual = ctx.needs_input_grad[:3]
    dx = None
    dbias = None
    # Without dropout both gradients are those of an addition, and no kernel is needed.
    if ctx.p == 0:
        dx = dy
        dbias = dy.flatten(0, -2).sum(0) if of_bias else None
    elif of_x or of_bias:
        *numbers, mask_bits = ctx.saved_tensors
        dx, sums = _bias_dropout_add_backward(dy, ctx.p, ctx.key, *numbers, ctx.first_head, mask_bits, of_bias)
        dbias = sums if of_bias else None
    return dx, dbias, dy if of_residual else None, *[None] * 6


torch.library.register_fake(
    "megatron_core::dropout_keep",
    lambda shape, p, key, sample_index, *_: sample_index.new_empty(shape, dtype=torch.bool),
)
_bias_dropout_add.register_fake(lambda x, bias, residual, p, *_: (new_like(x), _room_for_kept(x, p)))
_bias_dropout_add.register_autograd(_backward, _save)
_bias_dropout_add_backward.register_fake(lambda dy, *arguments: (new_like(dy), _sums_of(dy, arguments[-1])))
_bias_dropout_add_backward.register_no_autograd()
