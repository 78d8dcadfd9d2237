"""Operations on lists of tensors in few launches: sum of squares, scaling, and AdamW in one pass.

The tensors of a list have one dtype and one device and are contiguous; their sizes and their number are arbitrary.
These operations have no backward, as they run after it.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import native
from megatron_core.ops.backend import Backend, python_backend, select_backend_for
from megatron_core.ops.operator import define

CHUNK = 16384
"""Elements per work item: large enough to hide scheduling, and small enough that 20 M elements occupy every GPU."""


def squared_norm(tensors: Sequence[Tensor], *, backend: Backend = "auto") -> Tensor:
    """Sum of x^2 over all elements of all tensors: a float64 scalar on their device, without synchronization.

    The result is inf or nan if any element is, so it also serves as that check. The native kernels square and add in
    float64: squares of narrower types do not overflow, the relative error is a few roundings of float64, and the
    order of the sum depends only on the sizes, so that the result is bitwise equal for any number of threads. An empty
    list gives 0 on torch's default device.
    """
    # A rank may own no parameter of a group, and still takes part in the sum over ranks.
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    _check("squared_norm", tensors=tensors)
    chosen = _select_backend(tensors, backend)
    if chosen != "native":
        return python_backend(chosen).squared_norm(tensors)
    return _squared_norm(tensors)


def scale_(tensors: Sequence[Tensor], factor: float, *, backend: Backend = "auto") -> None:
    """x = factor * x for all tensors, in place."""
    _check("scale_", tensors=tensors)
    chosen = _select_backend(tensors, backend) if tensors else "reference"
    if chosen == "native":
        _scale_(tensors, factor)
    else:
        python_backend(chosen).scale_(tensors, factor)


def adamw_(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    factor: float = 1.0,
    backend: Backend = "auto",
) -> None:
    """Step t = ``step`` (from 1) of AdamW, as in torch.optim.AdamW (Loshchilov and Hutter 2019, algorithm 2):

        g = factor * grad
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = (1 - lr weight_decay) w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)

    ``weights`` and the moments are float32 and ``grads`` float32 or 16 bits; or all are float64. ``copies``, if given,
    have 16 bits and are set to the rounded new weights. The values of ``grads`` afterwards are undefined.
    """
    # One pass moves at most 30 bytes per parameter: gradient 4, moments 16, weight 8, copy 2. The step is bound by
    # memory, so clipping (``factor``) and the copies of the weights are parts of it instead of passes of their own.
    # Check the lists.
    lists = {"grads": grads, "weights": weights, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "copies": copies}
    _check("adamw_", **lists)
    _check_adamw(lists)
    # Run the reference or a library.
    beta1, beta2 = betas
    chosen = _select_backend(weights, backend) if weights else "reference"
    if chosen != "native":
        rates = {"beta1": beta1, "beta2": beta2, "eps": epsilon, "lr": lr, "weight_decay": weight_decay}
        python_backend(chosen).adamw_(*lists.values(), step=step, factor=factor, **rates)
        return
    # Run the native kernel.
    _adamw_(
        *lists.values(),
        factor=factor,
        beta1=beta1,
        beta2=beta2,
        keep=1.0 - lr * weight_decay,
        step_size=lr / (1.0 - beta1**step),
        correction=1.0 / math.sqrt(1.0 - beta2**step),
        epsilon=epsilon,
    )


@define("squared_norm")
def _squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    # Shards of small parameters are often empty; an address of no memory must not reach a kernel.
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    # One sum for each chunk, added in the order of chunks: the number of threads cannot change the order.
    partial = torch.empty(sum(-(-x.numel() // CHUNK) for x in nonempty), dtype=torch.float64, device=device)
    total = torch.empty((), dtype=torch.float64, device=device)
    table = table_of(nonempty)
    native.call("squared_norm", tensors[0], len(table), table, CHUNK, partial, len(partial), total)
    return total


@define("scale_", mutates_args=("tensors",))
def _scale_(tensors: Sequence[Tensor], factor: float) -> None:
    table = table_of(tensors)
    native.call("scale", tensors[0], len(table), table, CHUNK, float(factor))


@define("adamw_", mutates_args=("weights", "exp_avgs", "exp_avg_sqs", "copies"))
def _adamw_(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    factor: float,
    beta1: float,
    beta2: float,
    keep: float,
    step_size: float,
    correction: float,
    epsilon: float,
) -> None:
    table = table_of(grads, weights, exp_avgs, exp_avg_sqs, copies or None)
    copy_dtype = copies[0].dtype if copies else torch.float32
    numbers = map(float, (factor, beta1, beta2, keep, step_size, correction, epsilon))
    native.call("adamw", grads[0], copy_dtype, len(table), table, CHUNK, *numbers)


@torch.library.register_fake("megatron_core::squared_norm")
def _(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


# Without this rule autograd would silently treat the result as a constant.
def _refuse(ctx: object, inputs: tuple, output: object) -> NoReturn:
    raise NotImplementedError("squared_norm has no backward; detach its tensors, or take backend='reference'")


torch.library.register_autograd("megatron_core::squared_norm", _refuse, setup_context=_refuse)


def table_of(first_list: Sequence[Tensor], *further_lists: Sequence[Tensor] | None) -> Tensor:
    """The table of csrc/common/multi_tensor.h for corresponding lists: sizes and addresses (0 for None)."""
    rows = [
        [tensor.numel(), *(0 if tensors is None else tensors[i].data_ptr() for tensors in (first_list, *further_lists))]
        for i, tensor in enumerate(first_list)
        if tensor.numel()
    ]
    # On the host: CUDA launches get 64 rows at a time by value, so that no copy to the device is needed.
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _select_backend(tensors: Sequence[Tensor], backend: Backend) -> str:
    return select_backend_for("multi_tensor", backend, tensors[0], tensors)


def _check(op: str, **lists: Sequence[Tensor]) -> None:
    """Check that all tensors are contiguous and on one device, and that each list has one dtype."""
    tensors_in_order = [(name, i, tensor) for name, tensors in lists.items() for i, tensor in enumerate(tensors)]
    for name, i, tensor in tensors_in_order:
        first = lists[name][0]
        entry = f"{op}: {name}[{i}]"
        if not tensor.is_contiguous():
            raise ConfigError(f"{entry} has strides {tensor.stride()}; it must be contiguous")
        if tensor.dtype != first.dtype:
            raise ConfigError(f"{entry} is {tensor.dtype} and {name}[0] {first.dtype}; both must have the same dtype")
        if tensor.device != tensors_in_order[0][2].device:
            raise ConfigError(
                f"{entry} is on {tensor.device}; all must be on {tensors_in_order[0][2].device}, like the first"
            )


def _check_adamw(lists: dict[str, Sequence[Tensor]]) -> None:
    """Check that the lists have tensors of the same sizes, and compatible dtypes."""
    sizes = [weight.numel() for weight in lists["weights"]]
    for name, tensors in lists.items():
        if [tensor.numel() for tensor in tensors] != sizes and (tensors or name != "copies"):
            raise ConfigError(f"adamw_: {name} have {[t.numel() for t in tensors]} elements and weights {sizes}")
    dtypes = {name: tensors[0].dtype for name, tensors in lists.items() if tensors}
    weight = dtypes.get("weights")
    half = (torch.bfloat16, torch.float16)
    legal = {"weights": (torch.float32, torch.float64), "exp_avgs": (weight,), "exp_avg_sqs": (weight,)}
    exact = weight == torch.float64
    legal |= {"grads": (weight,) if exact else (weight, *half), "copies": () if exact else half}
    for name, dtype in dtypes.items():
        if dtype not in legal[name]:
            raise ConfigError(
                f"adamw_: {name} are {dtype} with {weight} weights; weights and moments must be float32, gradients "
                "float32 or 16 bits, copies 16 bits; or all float64, without copies"
            )
