"""The optimizer of all chunks of a model."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.optimizer_config import (
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    combine_param_group_overrides,
    get_standard_config_overrides,
)
from megatron_core.data_parallel import Bucket, BucketMemory, DataParallelSettings
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.offload.pipeline import OffloadedMemory
from megatron_core.optimizer.loss_scale import make_loss_scale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.current import current
from megatron_core.parallel.sharding import ShardSpec, Split, spec_of
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.training.driver import update_weights


@dataclass
class _AllChunks:
    """The buckets of all chunks, with the interface of one ``DataParallel``."""

    buckets: list[Bucket]
    device: torch.device
    memory: BucketMemory
    compressor: None = None
    settings: DataParallelSettings = field(default_factory=DataParallelSettings)


class _WithState(Optimizer):
    """The engine's optimizer with ``state`` as torch's have it."""

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Views of this rank's moments and main weights; flat if the rank has a part of the parameter."""
        views: dict[nn.Parameter, dict[str, Tensor]] = {}
        for bucket, tensors in self.tensors():
            for _, parameter, start, stop, at in bucket.pieces():
                shape = parameter.shape if stop - start == parameter.numel() else (-1,)
                views[parameter] = {kind: flat[at : at + stop - start].view(shape) for kind, flat in tensors.items()}
        return views


def _param_group_override_keys() -> tuple[str, ...]:
    return tuple(ParamGroupOverride.__annotations__)


param_group_identifier_keys = (*_param_group_override_keys(), "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""The keys that identify a parameter group; schedulers do not change them."""


class MegatronOptimizer:
    """The engine's ``Optimizer`` with Megatron Core's methods, ZeRO as in the model's wrapper, and float32 main
    weights.

    ``param_groups`` has the parameters with the same overrides. Every step reads ``lr``, ``weight_decay`` and ``eps``
    of each group; ``OptimizerParamScheduler`` sets the first two. All ranks have the same groups, some of which may be
    empty.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[Any],
        config_overrides: dict[ParamKey, ParamGroupOverride] | None = None,
    ) -> None:
        self.config, self.model_chunks, self._own = config, list(model_chunks), config.translated()
        wrappers = [chunk.data_parallel for chunk in self.model_chunks]
        buckets = [bucket for wrapper in wrappers for bucket in wrapper.buckets]
        dtype = next((bucket.weights.dtype for bucket in buckets), torch.float32)
        memory = BucketMemory()
        if self._own.offloads_optimizer:
            memory = OffloadedMemory(memory, self._own, current().rank)
        everything: Any = _AllChunks(buckets, wrappers[0].device, memory)
        overrides = get_standard_config_overrides(config) if config_overrides is None else config_overrides
        self.param_groups = self._groups(everything, overrides)
        self.chained_optimizers: list[MegatronOptimizer] = [self]
        scale = make_loss_scale(self._own, dtype)
        self.optimizer = _WithState(everything, self._own, current(), scale, param_groups=self.param_groups)

    def _groups(self, everything: _AllChunks, overrides: dict[ParamKey, ParamGroupOverride]) -> list[dict[str, Any]]:
        members = defaultdict[str, list[nn.Parameter]](list)
        for bucket in everything.buckets:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                own = combine_param_group_overrides(o for key, o in overrides.items() if key.matches(parameter, name))
                members[json.dumps([sorted(own.items()), "edp" in bucket.kind.replica_axes])].append(parameter)
        texts = gather_from_all_ranks("\n".join(members), everything.device)
        keys = sorted({key for text in texts for key in text.splitlines()}, key=lambda key: (len(key), key))
        return [self._group(members[key], *json.loads(key)) for key in keys]

    def _group(self, params: list[nn.Parameter], own: list[tuple[str, Any]], is_expert: bool) -> dict[str, Any]:
        lr, decay = self.config.lr, self._own.weight_decay
        group: dict[str, Any] = {
            "params": params,
            "max_lr": lr,
            "min_lr": self._own.min_lr,
            "wd_mult": 1.0,
            "eps": self._own.adam_eps,
        }
        group |= {"lr_mult": 1.0, "is_expert_parallel": is_expert, "is_decoupled_lr": False} | dict(own)
        default = not {"max_lr", "min_lr"} & dict(own).keys()
        return group | {"lr": group["max_lr"], "weight_decay": decay * group["wd_mult"], "default_config": default}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    @torch.no_grad()
    def step(self) -> tuple[bool, float, None]:
        """Clip and update with the gradients that ``finalize_model_grads`` has reduced.

        Returns (whether the step was taken, the norm before clipping, None because zeros are not counted).
        """
        norm = self.get_grad_norm()
        return self.step_with_norm(norm), norm, None

    def get_grad_norm(self) -> float:
        """Return the norm of the gradients of all ranks' parameters."""
        with torch.no_grad():
            for buffer, gradient in self._replaced_gradients():
                buffer.copy_(gradient)
        return float(self.optimizer.gradient_norm())

    def _replaced_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor that the program has assigned to a ``main_grad``, after its place in the buffers, which the
        update reads. Raises ConfigError if the ranks have only shards of gradients."""
        for bucket in (bucket for chunk in self.model_chunks for bucket in chunk.data_parallel.buckets):
            for name, parameter, offset in zip(bucket.names, bucket.parameters, bucket.offsets, strict=True):
                gradient = getattr(parameter, "main_grad", None)
                buffer = bucket.grads[offset : offset + parameter.numel()]
                if gradient is None or gradient.data_ptr() == buffer.data_ptr():
                    continue
                if bucket.splits_grads:
                    raise ConfigError(f"{name}.main_grad was replaced at zero_stage=2 or 3; use zero_stage=1")
                yield buffer, gradient.flatten()

    @torch.no_grad()
    def step_with_norm(self, norm: float) -> bool:
        """Clip by ``norm`` and update; return whether the step was taken. ConfigError without a learning rate."""
        if any(group["lr"] is None for group in self.param_groups):
            raise ConfigError("OptimizerConfig: lr=None; give the learning rate, or set it by OptimizerParamScheduler")
        wrappers = [chunk.data_parallel for chunk in self.model_chunks]
        skipped = update_weights(self.optimizer, wrappers, norm, self._own.lr)
        for buffer, _ in self._replaced_gradients():
            buffer.zero_()
        return not skipped

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, which ``step`` divides out; a ``grad_scale_func``."""
        return loss * self.optimizer.loss_scale.scale

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale."""
        return torch.tensor([self.optimizer.loss_scale.scale])

    def get_parameters(self) -> list[nn.Parameter]:
        """Return all parameters of this rank."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Copy weights that were loaded into the model to the main weights."""
        if state_dict is not None:
            raise ConfigError("reload_model_params: state_dict is not supported; load it into the model first")
        for shard in self.optimizer.shards:
            if shard.main.data_ptr() != shard.bucket.weight_shard.data_ptr():
                shard.main.copy_(shard.bucket.weight_shard)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Return moments and main weights as parts of global tensors, and ``state``; loading fills the tensors in
        place."""
        return {**dict(self._tensors()), "state": self.state_dict()}

    def _tensors(self) -> Iterator[tuple[str, ShardedTensor]]:
        for bucket, tensors in self.optimizer.tensors():
            for kind, flat in tensors.items():
                for name, parameter, start, stop, at in bucket.pieces():
                    key = f"optimizer.{kind}.{name}"
                    part = flat[at : at + stop - start]
                    replica = 0 if bucket.is_writer else 1
                    flattened = (tuple(parameter.shape), start, stop)
                    yield key, ShardedTensor(key, part, spec_of(parameter), replica, flattened=flattened)
        for piece in self.optimizer.joint_state():
            key, shape = f"optimizer.{piece.name}", tuple(piece.memory.shape)
            spans = enumerate(zip(piece.box.start, piece.box.stop, strict=True))
            splits = tuple(Split(dim, f"dim{dim}", (((first, stop),),)) for dim, (first, stop) in spans)
            spec = ShardSpec(piece.global_shape, splits, tuple((split.axis, 0) for split in splits))
            replica = 0 if piece.owned else 1
            yield key, ShardedTensor(key, piece.memory, spec, replica, flattened=(shape, 0, piece.memory.numel()))

    def state_dict(self) -> dict[str, Any]:
        """Return counts and rates; the tensors are in ``sharded_state_dict``, which every layout can load."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        scale = self.optimizer.loss_scale.state_dict()
        return {"steps_taken": self.optimizer.steps_taken, "loss_scale": scale, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict`` or a loaded ``sharded_state_dict``."""
        state = state_dict.get("state", state_dict)
        self.optimizer.set_steps_taken(state["steps_taken"])
        self.optimizer.loss_scale.load_state_dict(state["loss_scale"])
        for group, saved in zip(
            self.param_groups,
            self._filter_and_reorder_param_groups(self.param_groups, state["param_groups"]),
            strict=True,
        ):
            group.update(saved)

    @staticmethod
    def _filter_and_reorder_param_groups(
        current_groups: list[dict[str, Any]], state_dict_groups: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the saved group for each current group; NeMo adds ``pre_`` to two of the identifying keys."""

        def identity(group: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)

        saved = {identity(group): group for group in state_dict_groups}
        missing = [group for group in current_groups if identity(group) not in saved]
        if missing:
            given = {key: missing[0].get(key) for key in param_group_identifier_keys}
            raise CheckpointError(f"the checkpoint has no parameter group with {given}; use its settings")
        return [saved[identity(group)] for group in current_groups]


class MixedPrecisionOptimizer(MegatronOptimizer):
    """``MegatronOptimizer`` of 16-bit weights, or of a sharding wrapper."""


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """``MegatronOptimizer`` of 16-bit weights without sharding."""


class FP32Optimizer(MegatronOptimizer):
    """``MegatronOptimizer`` of float32 weights without sharding."""


class ChainedOptimizer(MegatronOptimizer):
    """``MegatronOptimizer``s of different models, whose gradients are clipped by their common norm.

    ``get_megatron_optimizer`` returns one optimizer of all chunks and experts and does not need it.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        self.chained_optimizers = list(chained_optimizers)
        if not self.chained_optimizers:
            raise ConfigError("ChainedOptimizer: chained_optimizers=[] is empty; call get_megatron_optimizer")
        self.config = self.chained_optimizers[0].config
        self.model_chunks = [chunk for each in self.chained_optimizers for chunk in each.model_chunks]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, which the scheduler updates."""
        return [group for each in self.chained_optimizers for group in each.param_groups]

    def get_parameters(self) -> list[nn.Parameter]:
        """Return all parameters of this rank."""
        return [parameter for each in self.chained_optimizers for parameter in each.get_parameters()]

    def get_grad_norm(self) -> float:
        """Return the norm of the gradients of all optimizers."""
        return float(sum(each.get_grad_norm() ** 2 for each in self.chained_optimizers)) ** 0.5

    def step_with_norm(self, norm: float) -> bool:
        """Run the step of every optimizer; return whether all steps were taken."""
        return all([each.step_with_norm(norm) for each in self.chained_optimizers])

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the common loss scale."""
        return self.chained_optimizers[0].scale_loss(loss)

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale."""
        return self.chained_optimizers[0].get_loss_scale()

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Copy weights that were loaded into the models to the main weights."""
        for each in self.chained_optimizers:
            each.reload_model_params(state_dict)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Return the states of all optimizers by index; parameters of two models need different names."""
        return {str(i): each.sharded_state_dict() for i, each in enumerate(self.chained_optimizers)}

    def state_dict(self) -> Any:
        """Return the states of all optimizers by index."""
        return {str(i): each.state_dict() for i, each in enumerate(self.chained_optimizers)}

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore a ``state_dict`` or a loaded ``sharded_state_dict``."""
        if len(state_dict) != len(self.chained_optimizers):
            raise ConfigError(
                f"ChainedOptimizer: the state has {len(state_dict)} optimizers, but the chain has "
                f"{len(self.chained_optimizers)}; chain as many as were saved"
            )
        for i, each in enumerate(self.chained_optimizers):
            each.load_state_dict(state_dict[str(i)])
