"""A model with gradients averaged over data-parallel ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import buffers_of, partition_buckets
from megatron.core.optimizer.param_layout import FullParamLayout, in_order, whole_in_shards
from megatron.core.process_groups_config import check_groups
from megatron.core.transformer.module import MegatronModule, sharded
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.data_parallel import DataParallel, DataParallelSettings
from megatron_core.data_parallel.bucket_layout import FillRule, InOrder
from megatron_core.data_parallel.settings import BucketKind
from megatron_core.errors import ConfigError
from megatron_core.features.fp8.amax_history import AmaxHistories, update_of
from megatron_core.parallel.collectives import broadcast_
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import LocalGroup
from megatron_core.training.driver import finish_gradients


class DistributedDataParallel(MegatronModule):
    """``DataParallel`` of one chunk of a model, with Megatron Core's arguments and rules.

    Gradients are accumulated in ``parameter.main_grad``. ``finish_grad_sync`` averages them over data- and
    context-parallel ranks, or sums them with ``config.calculate_per_token_loss``, and then also sets ``parameter.grad``
    for torch's optimizers, unless ZeRO shards the gradient or its dtype differs from the parameter's. The next forward
    starts a new step with zero gradients, unless ``zero_grad_buffer`` was called.

    Below ZeRO stage 2 buckets have Megatron Core's layout: parameters in reverse order, whether or not their weights
    decay; gradients that are reduced in another way have buckets of their own. Without ``overlap_grad_reduce``, on
    later pipeline stages and with ``disable_bucketing`` there is one bucket of each kind. If ``full_param_layout`` has
    a buffer for hidden matrices, they have a buffer of their own, filled by the rule of
    ``LayerWiseDistributedOptimizer``, which never divides a hidden matrix.
    """

    buffers: Any
    """The flat buffers of dense layers, in place of the method of ``nn.Module``."""

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        full_param_layout: FullParamLayout | None = None,
    ) -> None:
        super().__init__(config)
        groups = current()
        check_groups(pg_collection, ("dp", "dp_cp", "expt_dp"), "DistributedDataParallel")
        self.module, self.ddp_config, self._groups = module, ddp_config, groups
        keys = [] if full_param_layout is None else full_param_layout.layouts
        self._whole_matrices = any(key.is_managed_by_layer_wise_optimizer for key in keys)
        self._matrices_apart = self._whole_matrices or ddp_config.zero_stage >= 2
        size = ddp_config.bucket_size or max(40_000_000, 1_000_000 * groups.group("dp-cp").size())
        # Only the first stage is at the end of backward, where small buckets hide what is left.
        is_one = not ddp_config.overlap_grad_reduce or groups.group("pp").rank() > 0
        self._bucket_size = 2**62 if disable_bucketing or (is_one and ddp_config.zero_stage < 2) else size
        self._lay_out()
        self._step_is_over, self._amax_histories = False, None
        settings = config.fp8_settings() if isinstance(config, TransformerConfig) else None
        if settings is not None:
            ranks, device = groups.group("tp-dp-cp"), self.data_parallel.device
            self._amax_histories = AmaxHistories([module], settings, ranks, device)

    def _lay_out(self) -> None:
        """Copy weights into buckets, and make views of these as buffers."""
        config = self.ddp_config
        self.data_parallel = DataParallel(
            {0: self.module},
            self._groups,
            DataParallelSettings(
                zero_stage=config.zero_stage,
                overlap_grad_reduce=config.overlap_grad_reduce,
                overlap_param_gather=config.overlap_param_gather,
                bucket_size=self._bucket_size,
                rule_of=self._rule_of,
                join=self._join,
            ),
        )
        self.buckets = self.data_parallel.buckets
        self.buffers, self.expert_parallel_buffers = (buffers_of(self.data_parallel, experts=e) for e in (False, True))
        overlap = config.overlap_grad_reduce
        how: Any = {"overlap_grad_reduce": overlap, "factor": self._factor}
        self.bucket_groups = partition_buckets(self.buffers, not overlap, **how)
        self.expert_parallel_bucket_groups = partition_buckets(self.expert_parallel_buffers, not overlap, **how)

    def separate_matrices(self, *, sharded: bool = False) -> None:
        """Lay out the buffers again with hidden matrices apart, for an optimizer that updates whole matrices.

        ``sharded``: ranks share its state, and no shard has a part of a hidden matrix.
        """
        changes = sharded and not self._whole_matrices and self.ddp_config.zero_stage < 2
        if changes or not self._matrices_apart:
            self._matrices_apart = True
            if changes:
                self._whole_matrices = True
                sharding: Any = {"use_distributed_optimizer": True}
                self.ddp_config = replace(self.ddp_config, **sharding)
            self.data_parallel.release()
            self._lay_out()

    def _join(self, kind: BucketKind) -> BucketKind:
        """Return the kind of a bucket for parameters of ``kind``; parameter groups of the optimizer have the rates."""
        if self.ddp_config.zero_stage >= 2 or (self._matrices_apart and kind.is_hidden_matrix):
            return kind
        return replace(kind, decay=True, matrix=False, embedding=False)

    def _rule_of(self, kind: BucketKind, shards: int) -> FillRule:
        if not self.ddp_config.zero_stage:
            return InOrder()
        whole = self._whole_matrices and kind.is_hidden_matrix
        return (whole_in_shards if whole else in_order)(shards, self.ddp_config.pad_buckets_for_high_nccl_busbw)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; the first call after ``finish_grad_sync`` starts a new step.

        Raises ConfigError while weights, or in training gradients, are offloaded.
        """
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            buffer.check_resident(gradients=torch.is_grad_enabled())
        if self._step_is_over and torch.is_grad_enabled():
            self.zero_grad_buffer()
        return self.module(*inputs, **kwargs)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Pass the output of the previous stage to the module."""
        inner: Any = self.module
        inner.set_input_tensor(input_tensor)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable reductions; the backward pass after it is the last of the step and may overlap reductions."""
        yield
        self.data_parallel.enable_grad_sync(0)

    def start_grad_sync(self, *unused: Any) -> None:
        """Start to reduce the complete gradients, with ``overlap_grad_reduce``."""
        self.data_parallel.start_grad_sync(0)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Sum and average all gradients; update the scales of FP8 from the largest values of the step."""
        groups = (*self.bucket_groups, *self.expert_parallel_bucket_groups)
        finished = [group.grad_reduce_finished for group in groups]
        if not any(finished):
            finish_gradients(self.data_parallel, update_of(self._amax_histories))
            self.scale_gradients(self._factor)
        elif not all(finished):
            raise ConfigError(
                f"finish_grad_sync was called for {sum(finished)} of {len(groups)} groups of buckets; call it for all, "
                "or only DistributedDataParallel.finish_grad_sync"
            )
        for bucket in self.buckets:
            own: Any = () if bucket.is_sharded else bucket.parameters
            for parameter in own:
                if parameter.dtype == bucket.grads.dtype:
                    parameter.grad = parameter.main_grad
        self._step_is_over = True

    @property
    def _factor(self) -> float:
        """Factor on the sums of gradients, which are averaged unless the loss is that of each token."""
        is_sum = getattr(self.config, "calculate_per_token_loss", False)
        return 1.0 if is_sum else 1.0 / self._groups.group("dp-cp").size()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply this rank's reduced gradients by a factor."""
        for bucket in self.buckets:
            bucket.grad_shard.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Start a new step with zero gradients."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self.data_parallel.zero_grad()
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            group.reset()
        self._step_is_over = False

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the weights updated by other ranks; with ``force_sync`` wait for them."""
        self.data_parallel.start_param_sync()
        if force_sync:
            self.data_parallel.finish_param_sync()

    def enable_forward_pre_hook(self) -> None:
        """Do nothing: with ``overlap_param_gather`` a forward always waits for its weights."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """With ``param_sync`` gather all weights now, for code that reads them outside a forward."""
        if param_sync:
            self.start_param_sync(force_sync=True)

    def free_overlap_buffers(self) -> None:
        """Wait for weights that are being gathered, before a checkpoint is saved."""
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.free_overlap_buffers()

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Free the memory of all gradients, whose values are lost, until ``restore_grad_buffers``."""
        if synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            buffer.offload_to_cpu(move_params=False)
        if empty_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Allocate the gradients again; they are zero."""
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            buffer.reload_from_cpu(move_params=False)
        if synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()

    def broadcast_params(self) -> None:
        """Copy the weights of the first data-parallel rank to the other ranks."""
        for bucket in self.buckets:
            if bucket.splits_weights:
                raise ConfigError("broadcast_params needs unsharded weights; use a strategy below ZeRO stage 3")
            axes = "-".join(bucket.kind.replica_axes)
            group = self._groups.group(axes)
            if not isinstance(group, LocalGroup):
                broadcast_(bucket.weights, self._groups.ranks(axes)[0], group)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, without a prefix of this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the state of the module; values are copied into the flat buffers."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the module's parameters as parts of global tensors."""
        return sharded(self.module, prefix)
