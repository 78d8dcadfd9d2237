"""Functions of process groups, models, initial weights and batches."""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from megatron.core.tensor_parallel.data import broadcast_data
from megatron.core.tensor_parallel.utils import divide
from megatron_core import parallel_state
from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from megatron_core.parallel.groups import Group
from megatron_core.parallel.initialization import Normal
from megatron_core.parallel.micro_batch import SequenceSplit


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise LayoutError, an AssertionError, if there is a remainder."""
    divide(numerator, denominator)


def get_tensor_model_parallel_group_if_none(
    tp_group: Group | None, is_expert: bool = False, check_initialized: bool = True
) -> Group | None:
    """Return ``tp_group``, or the current group of dense layers or experts; None without torch.distributed."""
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized)
    return parallel_state.get_tensor_model_parallel_group(check_initialized)


def get_pg_size(group: Group | None = None) -> int:
    """Return the size of a group; 1 for None or without torch.distributed."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: Group | None = None) -> int:
    """Return this rank's index in a group; 0 for None or without torch.distributed."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """Return an attribute of the outermost wrapper or model that has it, or with ``return_model_obj`` that object."""
    if isinstance(model, list):
        raise ConfigError("get_attr_wrapped_model takes one model; call it for each chunk")
    inner = model
    while not hasattr(inner, attr) or (not allow_none and getattr(inner, attr) is None):
        if not hasattr(inner, "module"):
            raise ConfigError(f"couldn't find attribute {attr} in {type(model).__name__}")
        inner = inner.module
    return inner if return_model_obj else getattr(inner, attr)


def get_model_config(model: Any) -> Any:
    """Return the model's ``config``."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """Return the models inside wrappers (objects with a ``module``); a list for a list."""
    if isinstance(model, list | tuple):
        return [unwrap_model(one, module_instances) for one in model]
    while hasattr(model, "module") and (module_instances is None or isinstance(model, module_instances)):
        model = model.module
    return model


def accepts_parameter(func: Any, param_name: str) -> bool:
    """Return whether ``func`` has a parameter of this name, or takes any keyword argument."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # a function without a signature
        return False
    return param_name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """Return an initializer with N(0, sigma)."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Callable[[Tensor], Tensor]:
    """Return an initializer with N(0, sigma / sqrt(multiplier x num_layers))."""
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def mup_scaled_init_method_normal(
    sigma: float, num_layers: int, width_mult: float, multiplier: float = 2.0
) -> Callable[[Tensor], Tensor]:
    """Return an initializer with N(0, sigma / sqrt(multiplier x num_layers x width_mult))."""
    return Normal(sigma / math.sqrt(multiplier * num_layers * width_mult))


def get_torch_version() -> TorchVersion:
    """Return the version of torch, which can be compared with other versions."""
    return torch.__version__


def get_te_version() -> TorchVersion:
    """Return 0.0.0: models do not use modules of Transformer Engine."""
    return TorchVersion("0.0.0")


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether torch has at least ``version``; a later version without ``check_equality``."""
    own = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    wanted = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return own >= wanted if check_equality else own > wanted


def get_flashinfer_version() -> Any:
    """Return None: the flashinfer package is not used."""
    return None


def is_flashinfer_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether flashinfer has at least ``version``; a later version without ``check_equality``."""
    own = get_flashinfer_version()
    wanted = TorchVersion(version)
    return own is not None and bool(wanted < str(own) or (check_equality and wanted == str(own)))


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """Return the given one: ``inference_params`` is the old name of ``inference_context``."""
    return inference_params if inference_context is None else inference_context


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return ``inp``, or a copy if it is a view; without ``keep_graph`` a leaf."""
    found = inp if inp._base is None else inp.clone()
    return found if keep_graph else found.detach().requires_grad_(requires_grad)


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """Return a tensor, or a list of tensors; AssertionError if one is a view of another tensor."""
    for each in tensor if isinstance(tensor, list) else [tensor]:
        assert not isinstance(each, Tensor) or each._base is None, (
            f"a tensor of shape {tuple(each.shape)} is a view, whose memory cannot be freed; call "
            f"make_viewless_tensor. {extra_msg or ''}"
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Set ``tensor.data``; AssertionError if it is a view."""
    assert_viewless_tensor(tensor).data = new_data_tensor


_NVTX = {"enabled": False}


def configure_nvtx_profiling(enabled: bool) -> None:
    """Enable ``nvtx_range_push`` and ``nvtx_range_pop``, which need a GPU."""
    _NVTX["enabled"] = enabled and torch.cuda.is_available()


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Start a range of NVIDIA's profiler."""
    if _NVTX["enabled"]:
        torch.cuda.nvtx.range_push(".".join(filter(None, (msg, suffix))))


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """End the last range."""
    if _NVTX["enabled"]:
        torch.cuda.nvtx.range_pop()


def nvtx_decorator(
    message: str | None = None, color: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that marks each call as a range with ``message`` or the function's name."""

    return lambda function: _nvtx_range(message or function.__qualname__)(function)


@contextmanager
def _nvtx_range(message: str) -> Iterator[None]:
    nvtx_range_push(message)
    try:
        yield
    finally:
        nvtx_range_pop()


class WrappedTensor:
    """A tensor that its owner gives away: ``unwrap`` returns it once."""

    def __init__(self, tensor: Tensor) -> None:
        self._held = [tensor]

    def unwrap(self) -> Tensor:
        """Return the tensor; IndexError the second time."""
        return self._held.pop()


def get_batch_on_this_cp_rank(
    batch: dict[str, Any], cp_group: Group | None = None, *, is_hybrid_cp: bool = False, **others: Any
) -> dict[str, Any]:
    """Return this context-parallel rank's part of a batch, split by ``SequenceSplit``.

    Sequences are ``[b, s]``; of a mask ``[b, 1, s, s]`` the queries are split. Borders of documents stay: attention
    here takes those of the whole sequence, which is cut whatever the documents are. ConfigError with ``is_hybrid_cp``.
    """
    if is_hybrid_cp:
        raise ConfigError(_HYBRID)
    group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
    return _part_of_sequences(batch, group.rank(), group.size())


def _get_batch_on_this_cp_rank_per_sequence_balancing(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    return _part_of_sequences(batch, dist.get_rank(cp_group), dist.get_world_size(cp_group))


def _part_of_sequences(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    split = SequenceSplit(cp_rank=rank, cp_size=size)

    def part(name: str, value: Any) -> Any:
        if name in _PACKED or not isinstance(value, Tensor) or value.dim() < 2:
            return value
        return split.local(value.transpose(1, 2)).transpose(1, 2) if name == "attention_mask" else split.local(value)

    return {name: part(name, value) for name, value in batch.items()}


get_thd_batch_on_this_cp_rank = unsupported(
    "get_thd_batch_on_this_cp_rank: batches with cu_seqlens are not supported; pass whole sequences"
)
_HYBRID = "hybrid_context_parallel is not supported in a program of your own; set context_parallel_size"
get_batch_on_this_hybrid_cp_rank = unsupported(_HYBRID)


def get_batch_on_this_tp_rank(
    batch: Mapping[str, Any] | None,
    *,
    has_cu_seqlens: bool | None = None,
    is_sft: bool | None = None,
    is_hybrid_cp: bool = False,
    **unused: Any,
) -> dict[str, Tensor | None]:
    """Return the batch of the first tensor-parallel rank, on this rank's device and in Megatron's order.

    Tokens, labels and positions ``[b, s]`` are int64, the loss mask float32, the attention mask bool; missing tensors
    are None. Other ranks may pass None or {}. Programs for newer releases pass ``has_cu_seqlens`` or ``is_sft`` and
    read five more keys of packed sequences: ``cu_seqlens`` ``[b, n]`` and ``max_seqlen`` ``[b]``, int32, if the switch
    is on; the others are None. Raises ConfigError with ``is_hybrid_cp``.
    """
    if is_hybrid_cp:
        raise ConfigError(_HYBRID)
    device, found = World.from_environment().device, dict[str, Tensor | None]()
    kinds = {torch.int64: ("tokens", "labels", "position_ids"), torch.float32: ("loss_mask",)}
    packed = {torch.int32: ("cu_seqlens", "max_seqlen")} if has_cu_seqlens or is_sft else {}
    for dtype, names in (kinds | {torch.bool: ("attention_mask",)} | packed).items():
        given = [(batch or {}).get(name) for name in names]
        data = {n: torch.empty(0, dtype=dtype) if t is None else t for n, t in zip(names, given, strict=True)}
        parts = broadcast_data(names, data, dtype)
        found |= {name: part.to(device) if part.numel() else None for name, part in parts.items()}
    newer = () if has_cu_seqlens is None and is_sft is None else _PACKED
    order = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    return {name: found[name] for name in order} | {name: found.get(name) for name in newer}


_PACKED = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


def flatten_batch_for_packed_sequences(batch: dict[str, Any]) -> dict[str, Any]:
    """Join the sequences ``[b, s]`` of ``batch`` to one ``[1, b s]`` if it has borders ``cu_seqlens`` ``[b, n]``.

    The borders of all documents become one row ``[1, m]`` without padding. A batch without borders is returned
    unchanged.
    """
    if batch.get("cu_seqlens") is None:
        return batch
    names = ("tokens", "labels", "loss_mask", "position_ids")
    whole = [batch[name] for name in names if batch.get(name) is not None]
    length = whole[0].shape[1] if whole else int(batch["cu_seqlens"][0, -1])
    joined = {name: batch[name].reshape(1, -1) for name in names if batch.get(name) is not None}
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        borders = batch.get(name)
        if borders is not None:
            # The borders in each sequence [b, n] become those in the joined sequence [1, m].
            starts = torch.arange(len(borders), device=borders.device, dtype=borders.dtype)[:, None] * length
            joined[name] = (borders + starts).flatten().unique_consecutive()[None]
    if batch.get("max_seqlen") is not None:
        joined["max_seqlen"] = batch["max_seqlen"].max().view(1)
    return batch | joined


class StragglerDetector:
    """Megatron's context around a micro-batch, without effect; ``--log-straggler`` detects slow ranks."""

    def __call__(self, bdata: bool = False) -> "StragglerDetector":
        """Return this object; ``bdata`` marks the reading of a batch."""
        return self

    def __enter__(self) -> "StragglerDetector":
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    level: int,
    msg: object,
    *args: Any,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
    **kwargs: Any,
) -> None:
    """Call ``logger.log(...)`` on the first rank of each pipeline stage. Errors: ``ConfigError`` for one group only."""
    if (tp_group is None) != (dp_cp_group is None):
        raise ConfigError("tp_group and dp_cp_group must be provided or not provided together")
    if not logger.isEnabledFor(level):
        return
    tp = tp_group or parallel_state.get_tensor_model_parallel_group()
    dp = dp_cp_group or parallel_state.get_data_parallel_group(with_context_parallel=True)
    if tp.rank() == dp.rank() == 0:
        logger.log(level, msg, *args, **kwargs)


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor of the caller; other tensors as they are."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_data_parallel_group_if_dtensor(tensor: Tensor, data_parallel_group: Group | None = None) -> Group | None:
    """Return the group of a DTensor of the caller; None for other tensors."""
    group = tensor.device_mesh.get_group() if isinstance(tensor, DTensor) else None
    assert group is None or data_parallel_group in (None, group), "the tensors have different groups"
    return group


def local_multi_tensor_applier(op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
    """Call ``op`` with the arguments of Apex's function of this name."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def local_multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: list[list[Tensor]], scale: float) -> None:
    """Write the tensors of the first list times ``scale`` to those of the second, as Apex's ``multi_tensor_scale``."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def local_multi_tensor_l2_norm(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[Tensor]], per_tensor: bool, *args: Any
) -> tuple[Tensor, None]:
    """Return (the norm ``[1]`` of all tensors in float32, None), as Apex's ``multi_tensor_l2norm``."""
    norms = [torch.linalg.vector_norm(tensor.float()) for tensors in tensor_lists for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None
