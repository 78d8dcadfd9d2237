"""The buckets of ``DistributedDataParallel`` as Megatron's buffers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.param_layout import (
    PerBufferParamLayout,
    group_params_for_buffers,
    lay_out,
)
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.data_parallel.bucket_layout import InOrder
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import reduce_scatter_wide_
from megatron_core.parallel.groups import Group
from megatron_core.parallel.handles import SummedAfter


def _compute_default_per_buffer_param_layout(
    params: Sequence[nn.Parameter], bucket_size: int | None
) -> PerBufferParamLayout:
    """Return the layout without sharding: parameters in sequence without padding."""
    return lay_out(params, bucket_size, InOrder())


def shard_buffer(buffer: torch.Tensor, data_parallel_world_size: int) -> list[torch.Tensor]:
    """Return equal parts of a flat tensor, one for each rank."""
    return list(buffer.view(data_parallel_world_size, -1))


def reduce_scatter_with_fp32_accumulation(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    all_to_all_output_tensor: torch.Tensor | None = None,
) -> SummedAfter | None:
    """Fill ``output_tensor`` with this rank's part of the sum of 16-bit inputs, taken in float32.

    With ``async_op`` return a handle. Memory for messages is always allocated here; of ``all_to_all_output_tensor``
    only the size is checked.
    """
    if op != torch.distributed.ReduceOp.SUM:
        raise ConfigError(f"reduce_scatter_with_fp32_accumulation sums; op={op} is not supported")
    if all_to_all_output_tensor is not None and all_to_all_output_tensor.numel() != input_tensor.numel():
        raise ConfigError(
            f"all_to_all_output_tensor has {all_to_all_output_tensor.numel()} elements; give {input_tensor.numel()}"
        )
    members: Any = torch.distributed.group.WORLD if group is None else group
    handle = reduce_scatter_wide_(output_tensor, input_tensor, members)
    if async_op:
        return handle
    handle.wait()
    return None


class _ParamAndGradBucket:
    """A bucket and its offset in its buffer."""

    def __init__(self, bucket: Bucket, offset: int, bucket_id: int) -> None:
        self.bucket, self.offset, self.bucket_id = bucket, offset, bucket_id
        self.params_list, self.params = bucket.parameters, set(bucket.parameters)
        self.numel_unpadded = bucket.used
        pairs = zip(bucket.parameters, bucket.offsets, strict=True)
        self.param_to_index = {parameter: (at, at + parameter.numel()) for parameter, at in pairs}

    @property
    def param_data(self) -> torch.Tensor:
        """The flat weights; without memory while ZeRO stage 3 has freed them."""
        return self.bucket.weights

    @property
    def grad_data(self) -> torch.Tensor:
        """The flat gradients of the parameters, before their reduction."""
        return self.bucket.grads


class _ParamAndGradBuffer:
    """Buckets with the same dtype and data-parallel group, in sequence in one flat tensor.

    ``param_data`` and ``grad_data`` can be offloaded: ``storage().resize_(0)`` frees the memory of all buckets, and
    resizing to the old size allocates it. Sharding strategies that free gradients or weights have no flat tensor of
    them; reading it raises ConfigError.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets: list[_ParamAndGradBucket] = []
        self.param_index_map: dict[nn.Parameter, tuple[int, int, int]] = {}
        self.numel = 0
        for number, bucket in enumerate(buckets):
            view = _ParamAndGradBucket(bucket, self.numel, number)
            for parameter, (start, stop) in view.param_to_index.items():
                self.param_index_map[parameter] = (self.numel + start, self.numel + stop, number)
            self.buckets.append(view)
            self.numel += bucket.weights.numel()
        self.params = list(self.param_index_map)
        self.numel_unpadded = sum(view.numel_unpadded for view in self.buckets)
        self.data_parallel_group: Group = buckets[0].dp_group
        self.data_parallel_world_size = self.data_parallel_group.size()
        self.param_dtype, self.grad_dtype = buckets[0].weights.dtype, buckets[0].grads.dtype
        self._grad_data = None if buckets[0].splits_grads else self._join_grads()
        self._param_data = None if buckets[0].splits_weights else self._join_weights()
        self._sizes = {"param_data": 0, "grad_data": 0}
        self._param_data_cpu: torch.Tensor | None = None

    def _join_grads(self) -> torch.Tensor:
        """Move the gradients, which are still zero, into one flat tensor."""
        for view in self.buckets:
            view.bucket.grads.untyped_storage().resize_(0)  # avoids memory for two copies
        device = self.buckets[0].bucket.grads.device
        flat = torch.zeros(self.numel, dtype=self.grad_dtype, device=device)
        for view in self.buckets:
            view.bucket.grads = flat[view.offset : view.offset + view.bucket.weights.numel()]
            for parameter, (start, stop) in view.param_to_index.items():
                parameter.main_grad = view.bucket.grads[start:stop].view_as(parameter)  # type: ignore[attr-defined]
        return flat

    def _join_weights(self) -> torch.Tensor:
        flat = torch.cat([view.bucket.weights for view in self.buckets])
        for view in self.buckets:
            view.bucket.weights = flat[view.offset : view.offset + view.bucket.weights.numel()]
            for parameter, (start, stop) in view.param_to_index.items():
                parameter.data = view.bucket.weights[start:stop].view_as(parameter)
        return flat

    @property
    def param_data(self) -> torch.Tensor:
        """The flat weights of all buckets."""
        return self._flat("weights", self._param_data)

    @property
    def grad_data(self) -> torch.Tensor:
        """The flat gradients of all buckets, before their reduction."""
        return self._flat("gradients", self._grad_data)

    @staticmethod
    def _flat(what: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise ConfigError(
                f"data_parallel_sharding_strategy frees the {what}, so a buffer has no flat tensor of them; use "
                "no_shard or optim to offload them"
            )
        return tensor

    def check_resident(self, *, gradients: bool) -> None:
        """Raise ConfigError if weights, or with ``gradients`` gradients, are offloaded."""
        needed = {"param_data": self._param_data, "grad_data": self._grad_data if gradients else None}
        for name, tensor in needed.items():
            if tensor is not None and not tensor.untyped_storage().nbytes():
                raise ConfigError(
                    f"{name} of a buffer is offloaded (its storage has size 0); restore it before forward"
                )

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Move the weights to the CPU and drop the gradients, to free their memory."""
        if move_params and self.param_data.untyped_storage().nbytes():
            self._param_data_cpu = self.param_data.cpu().clone()
            self._free("param_data")
        if move_grads and self.grad_data.untyped_storage().nbytes():
            self._free("grad_data")

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Restore the weights from the CPU; gradients become zero."""
        if move_params and self._param_data_cpu is not None and not self.param_data.untyped_storage().nbytes():
            self.param_data.untyped_storage().resize_(self._sizes["param_data"])
            self.param_data.copy_(self._param_data_cpu)
            self._param_data_cpu = None
        if move_grads and self._sizes["grad_data"] and not self.grad_data.untyped_storage().nbytes():
            self.grad_data.untyped_storage().resize_(self._sizes["grad_data"])
            self.grad_data.zero_()

    def _free(self, name: str) -> None:
        storage = getattr(self, name).untyped_storage()
        self._sizes[name] = storage.nbytes()
        storage.resize_(0)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply this rank's reduced gradients by a factor."""
        for view in self.buckets:
            view.bucket.grad_shard.mul_(scaling_factor)

    def reset(self) -> None:
        """Set gradients to zero."""
        for view in self.buckets:
            view.bucket.zero_grad()


class _ParamAndGradBucketGroup:
    """Buckets that are reduced and gathered together.

    ``DistributedDataParallel`` reduces them itself. A program with backward hooks of its own calls
    ``register_grad_ready`` and ``finish_grad_sync`` instead; sums of gradients are multiplied by ``factor``.
    """

    def __init__(
        self, buckets: list[_ParamAndGradBucket], overlap_grad_reduce: bool = False, factor: float = 1.0
    ) -> None:
        self.buckets, self.overlap_grad_reduce, self.factor = buckets, overlap_grad_reduce, factor
        self.params = set().union(*(view.params for view in buckets))
        self.intra_distributed_optimizer_instance_size = buckets[0].bucket.dp_group.size()
        self.param_gather_dispatched = self.grad_reduce_finished = self._is_reducing = False
        self.is_first_batch = self.is_last_microbatch = True
        self.per_param_grad_ready_counts: dict[nn.Parameter, int] = {}
        self.golden_per_param_grad_ready_counts: dict[nn.Parameter, int] = {}

    def reset(self) -> None:
        """Start a new step; the first one tells how many gradients each parameter gets."""
        if self.is_first_batch and self.per_param_grad_ready_counts:
            self.golden_per_param_grad_ready_counts = self.per_param_grad_ready_counts
            self.is_first_batch = False
        self.per_param_grad_ready_counts = {}
        self.is_last_microbatch, self.grad_reduce_finished, self._is_reducing = True, False, False

    def register_grad_ready(self, param: nn.Parameter, force_all_reduce: bool = False) -> None:
        """Count a gradient of the last micro-batch; after that of the last parameter the sums start.

        Errors: ``ConfigError`` without ``overlap_grad_reduce``, and for a parameter of another group.
        """
        if not self.overlap_grad_reduce:
            raise ConfigError("register_grad_ready needs overlap_grad_reduce=True; without it use finish_grad_sync")
        if param not in self.params:
            raise ConfigError(f"the parameter of shape {tuple(param.shape)} is not in this group of buckets")
        if self.is_last_microbatch:
            counts = self.per_param_grad_ready_counts
            counts[param] = counts.get(param, 0) + 1
            if not self.is_first_batch and counts == self.golden_per_param_grad_ready_counts:
                self.start_grad_sync()

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Start to sum the gradients; with ``use_distributed_optimizer`` each rank gets its part in either case.

        Errors: ``ConfigError`` for gradients that are summed over further ranks than the data-parallel ones.
        """
        for view in self.buckets:
            if view.bucket.kind.is_partial or view.bucket.instances.size() > 1:
                raise ConfigError(
                    f"gradients of {view.bucket.names[0]} are also summed over ranks that do not share its data; use "
                    "DistributedDataParallel.finish_grad_sync"
                )
            view.bucket.start_reduce()
        self._is_reducing = True

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Wait for the sums and multiply them; without ``overlap_grad_reduce``, and in the first step, start them too.

        Errors: ``ConfigError`` if gradients are missing.
        """
        if self.overlap_grad_reduce and self.grad_reduce_finished:
            return
        if not self.overlap_grad_reduce or self.is_first_batch:
            self.start_grad_sync()
        if not self._is_reducing:
            ready = len(self.per_param_grad_ready_counts)
            raise ConfigError(
                f"the sums of this group have not started: {ready} of {len(self.params)} parameters have gradients; "
                "call register_grad_ready for each"
            )
        for view in self.buckets:
            view.bucket.finish_reduce()
            view.bucket.round_sum()
            view.bucket.grad_shard.mul_(self.factor)
        self._is_reducing, self.grad_reduce_finished = False, True

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Start to gather the weights updated by other ranks; with ``force_sync`` wait for them."""
        for view in self.buckets:
            view.bucket.start_gather()
        self.param_gather_dispatched = True
        if force_sync:
            self.finish_param_sync()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Wait for the weights."""
        for view in self.buckets:
            view.bucket.finish_gather()

    def free_overlap_buffers(self) -> None:
        """Wait for weights that are being gathered, so that no memory is held for them."""
        self.finish_param_sync()


def buffers_of(data: DataParallel, *, experts: bool) -> list[_ParamAndGradBuffer]:
    """Return the buffers of dense layers, or of experts, one for each dtype and data-parallel group, and for hidden
    matrices if they are apart.
    """
    found: dict[Any, list[Bucket]] = {}
    for bucket in data.buckets:
        if ("edp" in bucket.kind.replica_axes) is experts:
            kind = bucket.kind
            found.setdefault((kind.dtype, kind.replica_axes, kind.is_hidden_matrix), []).append(bucket)
    return [_ParamAndGradBuffer(buckets) for buckets in found.values()]


def partition_buckets(
    buffers: Sequence[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,
    *,
    overlap_grad_reduce: bool = False,
    factor: float = 1.0,
) -> list[_ParamAndGradBucketGroup]:
    """Return a group for each bucket, or one group, with further arguments of ``_ParamAndGradBucketGroup``."""
    views = [view for buffer in buffers for view in buffer.buckets]
    groups = [views] if force_single_bucket_group and views else [[view] for view in views]
    return [_ParamAndGradBucketGroup(group, overlap_grad_reduce, factor) for group in groups]
