"""``PipelineModule`` with DeepSpeed's constructor, over ``megatron_core.PipelineModule``."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

import megatron_core
from deepspeed.comm.comm import init_distributed
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from megatron_core.errors import ConfigError


class PipelineError(Exception):
    """A method that a pipeline does not have."""


class LayerSpec(megatron_core.LayerSpec):
    """A layer that is constructed later, where it is needed."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.global_rank = dist.get_rank() if dist.is_initialized() else -1

    def build(self, log: bool = False) -> nn.Module:
        """Construct the layer."""
        return super().build()


class TiedLayerSpec(LayerSpec, megatron_core.TiedLayerSpec):
    """A layer that shares all its parameters with the other specs of ``key``; ``tied_weight_attr`` is kept."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        # Not super(): the next class of the resolution order takes no key.
        megatron_core.TiedLayerSpec.__init__(self, key, typename, *module_args, forward_fn=forward_fn, **module_kwargs)
        self.global_rank = dist.get_rank() if dist.is_initialized() else -1
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class PipelineModule(megatron_core.PipelineModule):
    """A model as a list of layers; each rank constructs those of its stage in the constructor.

    Initial weights depend on ``base_seed`` and the number of the layer, with and without ``seed_layers``.
    ``dynamic_shape`` has no effect: shapes may differ between batches in any case. Errors: ``ConfigError``,
    ``LayoutError``.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        if num_stages is None and topology is None:
            raise RuntimeError("must provide num_stages or topology")
        if seed_fn is not None or activation_checkpoint_func is not checkpointing.checkpoint:
            raise ConfigError(
                "PipelineModule: seed_fn and activation_checkpoint_func are not supported: random numbers depend on "
                "base_seed, and torch.utils.checkpoint recomputes; remove them"
            )
        init_distributed()
        ranks = dist.get_world_size()
        if topology is None:
            assert num_stages is not None
            if ranks % num_stages:
                raise RuntimeError(f"num_stages ({num_stages}) must divide distributed world size ({ranks})")
            topology = PipeDataParallelTopology(num_pp=num_stages, num_dp=ranks // num_stages)
        if topology.get_dim("model") > 1 or topology.get_axis_names()[:2] != ["pipe", "data"]:
            raise ConfigError(
                f"topology {topology.get_axis_names()} {topology.dims}: only ['pipe', 'data'] is supported, and "
                "'model' with one rank; split layers with tensor_plan= of megatron_core.PipelineModule"
            )
        super().__init__(
            list(layers),
            loss_fn=loss_fn,
            partition_method=partition_method,
            recompute_interval=activation_checkpoint_interval,
            seed=base_seed,
        )
        self.checkpointable_layers, self.seed_layers, self.base_seed = checkpointable_layers, seed_layers, base_seed
        self.dynamic_shape, self.activation_checkpoint_interval = dynamic_shape, activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self._topo, self._grid = topology, PipelineParallelGrid(topology)
        self.num_stages, self.stage_id = topology.get_dim("pipe"), self._grid.get_stage_id()
        self.global_rank, self.world_size = self._grid.get_global_rank(), ranks
        bounds = self.divide(self.num_stages)
        self.parts = [0, *(layers.stop for layers in bounds)]
        self.place(bounds, [self.stage_id])

    def partitions(self) -> list[int]:
        """Return the first layer of each stage, and the number of layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer."""
        return next(stage for stage, layers in enumerate(self.bounds) if layer_idx in layers)

    def topology(self) -> ProcessTopology:
        """Return the topology of the ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank in the topology."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Number of stages."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute this number of layers at a time in backward."""
        self.recompute_interval = self.activation_checkpoint_interval = interval
