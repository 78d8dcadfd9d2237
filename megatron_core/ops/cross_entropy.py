"""Partial statistics and gradients of a cross entropy over a split vocabulary; native kernels as torch operators.

Column c of ``logits`` ``[..., v]`` is token ``first`` + c of the vocabulary; columns from ``valid`` on are padding,
which is ignored and has zero gradient. ``target`` ``[...]`` are int64 tokens of the whole vocabulary.
``tensor_parallel.cross_entropy`` combines the parts into a differentiable loss.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference
from megatron_core.ops.backend import Backend, select_backend
from megatron_core.ops.operator import define, operator
from megatron_core.ops.rows import check_rows, count, in_rows, new_like, wide


def cross_entropy_parts(logits: Tensor, target: Tensor, first: int, valid: int, *, backend: Backend = "auto") -> Tensor:
    """Statistics of this part of the vocabulary, ``[4, ...]``, float32 or wider, in one pass over the logits.

    In this order: the maximum m, the sum of exp(z - m), the target's logit (0 if the target is in another part), and
    the sum of the logits. Without valid columns they are -inf, 0, 0, 0.
    Source: Milakov and Gimelshein 2018, section 3.
    """
    if select_backend("cross_entropy", backend, logits.device.type, logits.dtype) == "reference":
        _check(logits, target, valid)
        return reference.cross_entropy_parts(logits, target, first, valid)
    return _cross_entropy_parts(logits, target, first, valid)


def cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    first: int,
    valid: int,
    *,
    label_smoothing: float,
    vocab_size: int,
    overwrite: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """dlogits = dloss * (exp(z - m) / s - (1 - e) [target] - e / V), 0 in the padding, in the logits' dtype.

    ``dloss`` ``[...]``; ``statistics`` ``[2, ...]`` are the maximum m and the sum s of exp(z - m) over all parts; e is
    the label smoothing, V the size of the whole vocabulary. With ``overwrite`` the gradient is written to ``logits``,
    which are returned.
    """
    # Computed here in Python's double precision, not in each kernel.
    target_share = 1.0 - label_smoothing
    spread = label_smoothing / vocab_size
    arguments = (dloss, logits, target, statistics, first, valid, target_share, spread)
    if select_backend("cross_entropy", backend, logits.device.type, logits.dtype) == "reference":
        _check(logits, target, valid)
        return reference.cross_entropy_backward(*arguments, overwrite)
    if not overwrite:
        return _cross_entropy_backward(*arguments)
    _cross_entropy_backward_(*arguments)
    return logits


@operator("cross_entropy_parts")
def _cross_entropy_parts(logits: Tensor, target: Tensor, first: int, valid: int) -> Tensor:
    _check(logits, target, valid)
    statistics = _new_parts(logits)
    native.call(
        "cross_entropy_parts", logits, count(logits), valid, *in_rows(logits), target.contiguous(), first, statistics
    )
    return statistics


# Both signatures are written out, because torch derives the schema of an operator from that of its function.
@operator("cross_entropy_backward")
def _cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    first: int,
    valid: int,
    target_share: float,
    spread: float,
) -> Tensor:
    dlogits = new_like(logits)
    _write_gradient(dlogits, dloss, logits, target, stats, first, valid, target_share, spread)
    return dlogits


@define("cross_entropy_backward_", mutates_args=("logits",))
def _cross_entropy_backward_(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    first: int,
    valid: int,
    target_share: float,
    spread: float,
) -> None:
    # The operator declares that it changes ``logits``, so autograd notices a later use of them.
    rows, _ = in_rows(logits)
    assert rows is not None, "None is for None alone"
    _write_gradient(rows, dloss, logits, target, stats, first, valid, target_share, spread)
    if rows.data_ptr() != logits.data_ptr():  # rows are a copy, because the strides do not allow a view
        logits.copy_(rows.view(logits.shape))


def _write_gradient(rows: Tensor, dloss: Tensor, logits: Tensor, target: Tensor, stats: Tensor, *numbers: Any) -> None:
    first, valid, target_share, spread = numbers
    _check(logits, target, valid)
    for name, tensor, shape in (("dloss", dloss, target.shape), ("statistics", stats, (2, *target.shape))):
        if tensor.shape != shape or tensor.dtype != wide(logits.dtype):
            raise ConfigError(
                f"cross_entropy_backward: {name} is {tensor.dtype} {list(tensor.shape)}; for logits "
                f"{logits.dtype} {list(logits.shape)} it must be {wide(logits.dtype)} {list(shape)}"
            )
    native.call(
        "cross_entropy_backward",
        logits,
        *(count(logits), logits.shape[-1], valid, *in_rows(logits), target.contiguous(), first),
        *(stats.contiguous(), dloss.contiguous(), target_share, spread, *in_rows(rows)),
    )


def _new_parts(logits: Tensor) -> Tensor:
    return logits.new_empty((4, *logits.shape[:-1]), dtype=wide(logits.dtype))


def _check(logits: Tensor, target: Tensor, valid: int) -> None:
    check_rows("cross_entropy", logits, {})
    if target.shape != logits.shape[:-1]:
        raise ConfigError(
            f"cross_entropy: target is {list(target.shape)}; for logits {list(logits.shape)} it must be "
            f"{list(logits.shape[:-1])}"
        )
    if target.dtype != torch.int64 or target.device != logits.device:
        raise ConfigError(
            f"cross_entropy: target is {target.dtype} on {target.device}; it must be torch.int64 on {logits.device}"
        )
    if not 0 <= valid <= logits.shape[-1]:
        raise ConfigError(f"cross_entropy: valid={valid} of {logits.shape[-1]} columns; legal: 0 to all of them")


INSTEAD = "take tensor_parallel.vocab_parallel_cross_entropy, which has one"
_cross_entropy_parts.register_fake(lambda logits, *_: _new_parts(logits))
_cross_entropy_backward.register_fake(lambda dloss, logits, *_: new_like(logits))
_cross_entropy_parts.register_no_autograd(INSTEAD)
_cross_entropy_backward.register_no_autograd(INSTEAD)
