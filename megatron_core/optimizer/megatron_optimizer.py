"""For Megatron Core's users: one optimizer of all chunks of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.data_parallel import Bucket
from megatron_core.errors import ConfigError
from megatron_core.optimizer.optimizer import Optimizer, make_loss_scale
from megatron_core.optimizer.optimizer_config import OptimizerConfig
from megatron_core.parallel.current import current
from megatron_core.parallel.sharded_tensor import ShardedTensor
from megatron_core.parallel.sharding import spec_of


@dataclass
class _AllChunks:
    """The buckets of all chunks as one ``DataParallel`` has them."""

    buckets: list[Bucket]
    device: torch.device
    compressor: None = None


class MegatronOptimizer:
    """``Optimizer`` with Megatron Core's methods: ZeRO as the model's wrapper says, float32 main weights.

    ``param_groups`` are two, with and without weight decay (biases and norms), whose ``lr`` and ``weight_decay`` every
    step reads; ``OptimizerParamScheduler`` sets them.
    """

    def __init__(self, config: OptimizerConfig, model_chunks: Sequence[Any]) -> None:
        self.config, self.model_chunks, self._own = config, list(model_chunks), config.translated()
        wrappers = [chunk.data_parallel for chunk in self.model_chunks]
        buckets = [bucket for wrapper in wrappers for bucket in wrapper.buckets]
        dtype = next((bucket.weights.dtype for bucket in buckets), torch.float32)
        everything: Any = _AllChunks(buckets, wrappers[0].device)
        self.optimizer = Optimizer(everything, self._own, current(), make_loss_scale(self._own, dtype))
        self.param_groups = [self._group(buckets, decays) for decays in (True, False)]

    def _group(self, buckets: list[Bucket], decays: bool) -> dict[str, Any]:
        return {
            "params": [p for bucket in buckets if bucket.kind.decay is decays for p in bucket.parameters],
            "lr": self._own.lr,
            "max_lr": self._own.lr,
            "min_lr": self._own.min_lr,
            "weight_decay": self._own.weight_decay * decays,
            "wd_mult": float(decays),
            "default_config": decays,
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    @torch.no_grad()
    def step(self) -> tuple[bool, float, None]:
        """Clip and update with the gradients that ``finalize_model_grads`` has left.

        (Whether the step was taken, the norm before clipping, None as zeros are not counted).
        """
        first = self.param_groups[0]
        self.optimizer.config = replace(self.optimizer.config, weight_decay=float(first["weight_decay"]))
        norm = float(self.optimizer.gradient_norm())
        skipped = self.optimizer.step(float(first["lr"]), norm, self._own.decoupled_lr)
        for chunk in self.model_chunks:
            chunk.start_param_sync()
        return not skipped, norm, None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, which ``step`` divides out: a model's ``grad_scale_func``."""
        return loss * self.optimizer.loss_scale.scale

    def get_loss_scale(self) -> Tensor:
        """The loss scale."""
        return torch.tensor([self.optimizer.loss_scale.scale])

    def get_parameters(self) -> list[nn.Parameter]:
        """All parameters of this rank."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def reload_model_params(self) -> None:
        """Take over weights that were loaded into the model."""
        for shard in self.optimizer.shards:
            if shard.main.data_ptr() != shard.bucket.weight_shard.data_ptr():
                shard.main.copy_(shard.bucket.weight_shard)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Moments and main weights as parts of global tensors, and ``state``; loading fills the tensors in place."""
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

    def state_dict(self) -> dict[str, Any]:
        """Counts and rates; the tensors are in ``sharded_state_dict``, which every layout can read."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        scale = self.optimizer.loss_scale.state_dict()
        return {"steps_taken": self.optimizer.steps_taken, "loss_scale": scale, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, or from a loaded ``sharded_state_dict``."""
        state = state_dict.get("state", state_dict)
        self.optimizer.set_steps_taken(state["steps_taken"])
        self.optimizer.loss_scale.load_state_dict(state["loss_scale"])
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(saved)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """The optimizer of models in ``DistributedDataParallel``; ``use_gloo_process_groups`` changes nothing.

    ConfigError: overrides of single parameters, which are not supported, or a model without the wrapper.
    """
    refused = {"config_overrides": config_overrides, "dump_param_to_param_group_map": dump_param_to_param_group_map}
    if wrong := [name for name, value in refused.items() if value]:
        raise ConfigError(f"get_megatron_optimizer: {', '.join(wrong)} is not supported; leave it out")
    if not model_chunks or not all(hasattr(chunk, "data_parallel") for chunk in model_chunks):
        raise ConfigError("get_megatron_optimizer needs models that are wrapped by DistributedDataParallel")
    return MegatronOptimizer(config, model_chunks)
