"""The optimizer that ``deepspeed.initialize`` returns."""

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from deepspeed.runtime.zero.offload_states import StatePlacement
from megatron_core.any_model import Engine
from megatron_core.any_model.torch_optimizer import TorchOptimizer
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.loss_scaling.scale import DynamicLossScale


class StepStates(Mapping[nn.Parameter, Mapping[str, Any]]):
    """``state[parameter]["step"]``: the number of updates; moments are in shards."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getitem__(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        if not any(each is parameter for each in self):
            raise KeyError("the parameter is not trained by this engine, or was not updated yet")
        return _State(step=self._engine.state.iteration - self._engine.state.skipped_iterations)

    def __iter__(self) -> Iterator[nn.Parameter]:
        groups = self._engine.optimizer.param_groups
        updates = self._engine.state.iteration - self._engine.state.skipped_iterations
        return (parameter for group in groups for parameter in group["params"] if updates)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _State(dict[str, Any]):
    def __missing__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"optimizer.state[parameter][{name!r}] is in shards of all ranks; call "
            f"deepspeed.utils.safe_get_full_optimizer_state(parameter, {name!r}) on all ranks"
        )


class LossScaler:
    """The loss scale of an engine, and its rule; ``cur_iter`` counts steps, with skipped ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    loss_scale = cur_scale = property(lambda self: self._engine.loss_scale)
    cur_iter = property(lambda self: self._engine.state.iteration)
    use_grad_scaling = property(lambda self: self._engine.config.training.fp16)
    dynamic = dynamic_loss_scale = property(lambda self: isinstance(self._engine.loss_scaler, DynamicLossScale))
    # Of a dynamic loss scale alone: a constant one has no such attributes.
    scale_factor = property(lambda self: self._engine.loss_scaler.growth_factor)
    scale_window = property(lambda self: self._engine.loss_scaler.window)
    min_loss_scale = property(lambda self: self._engine.loss_scaler.minimum)


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Parameter groups of an engine, and its loss scale."""

    _opt_called = True
    """Read by schedulers of torch, which warn if ``step`` below was not called: the engine calls its own."""

    def __init__(self, engine: Engine, step: Callable[[], object], client: torch.optim.Optimizer | None = None) -> None:
        # Not torch's constructor: groups, state and defaults are those of the engine's optimizer.
        self._engine, self._inner, self._take_step = engine, engine.optimizer, step
        self._client = client
        if isinstance(engine.loss_scaler, DynamicLossScale):  # it grows in the same steps as DeepSpeed's
            engine.loss_scaler.delay_growth(1)

    param_groups = property(lambda self: self._inner.param_groups)
    state = property(lambda self: StepStates(self._engine))
    defaults = property(lambda self: self._inner.defaults)

    _global_grad_norm = property(lambda self: getattr(self._engine.last_report, "grad_norm", 0.0))
    # Parts of this rank, in the engine's buckets: main weights in float32, and whole weights in the model's dtype.
    fp32_groups_flat = property(lambda self: [shard.main for shard in self._engine._sharded.shards])
    single_partition_of_fp32_groups = fp32_partitioned_groups_flat = fp32_groups_flat
    bit16_groups_flat = property(lambda self: [shard.bucket.weights for shard in self._engine._sharded.shards])

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        report = self._engine.last_report
        return report is not None and report.skipped

    loss_scale = cur_scale = property(lambda self: self._engine.loss_scale, doc="Factor of the losses (fp16).")
    loss_scaler = loss_scale_config = property(lambda self: LossScaler(self._engine), doc="Loss scale with its rule.")
    dynamic_loss_scale = property(lambda self: self.loss_scaler.dynamic, doc="Whether overflows change the loss scale.")
    optimizer = property(
        lambda self: self if self._client is None else self._client,
        doc="The optimizer of the program, or of the class that the JSON names.",
    )

    def needs_scaler(self) -> bool:
        """Whether ``loss.backward()`` needs ``engine.scale(loss)``, as with a dynamic loss scale."""
        return bool(self.dynamic_loss_scale)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As ``engine.step()``."""
        self._take_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients since the last step; do nothing in an accumulation that has begun."""
        if not self._engine.micro_step:
            self._engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's shards of the state, and the settings of the groups, as in DeepSpeed.

        Only the same layout can load them; checkpoints of ``engine.save_checkpoint`` are for every layout.
        """
        sharded = self._engine._sharded
        shards = [tensor.clone() for tensor in self._shards()]
        by_class: list[Any] = []
        if isinstance(sharded, TorchOptimizer):
            by_class = [copy.deepcopy(sharded.caller.state[piece.weights]) for piece in sharded.pieces]
        return {
            "shards": shards,
            "by_class": by_class,
            "param_groups": [{name: group[name] for name in group if name != "params"} for group in self.param_groups],
            "steps_taken": sharded.steps_taken,
            "loss_scale": sharded.loss_scale.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on this rank of an engine with the same layout and parameters.

        Load the weights into ``engine.module`` before.
        """
        sharded = self._engine._sharded
        shards = self._shards()
        if "shards" not in state_dict or [s.shape for s in shards] != [s.shape for s in state_dict["shards"]]:
            raise CheckpointError(
                "optimizer.load_state_dict(): its shards are not those of this rank, layout and model; checkpoints of "
                "engine.save_checkpoint can be loaded in every layout"
            )
        # Compared before anything is written, so that an error leaves the optimizer as it was.
        stored_shards = iter(state_dict["shards"])
        for bucket, tensors in sharded.tensors():
            stored = dict(zip(tensors, islice(stored_shards, len(tensors)), strict=True))
            if "main" in tensors and not torch.equal(stored["main"].to(bucket.weights.dtype), bucket.weight_shard):
                raise CheckpointError(
                    "optimizer.load_state_dict(): the weights of the module are not those of this state; call "
                    "engine.module.load_state_dict before"
                )
        for shard, stored_shard in zip(shards, state_dict["shards"], strict=True):
            shard.copy_(stored_shard)
        self._engine.whole.accept_weights()
        if isinstance(sharded, TorchOptimizer):
            for piece, values in zip(sharded.pieces, copy.deepcopy(state_dict["by_class"]), strict=True):
                sharded.caller.state[piece.weights] = values
        for group, settings in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(settings)
        sharded.set_steps_taken(state_dict["steps_taken"])
        sharded.loss_scale.load_state_dict(state_dict["loss_scale"])

    def _shards(self) -> list[Tensor]:
        """This rank's shards: main weights of 16-bit weights, and moments."""
        sharded = self._engine._sharded
        sharded.before_update()
        if sharded.compressor is not None:
            raise CheckpointError("optimizer.state_dict() with compressed gradients: use engine.save_checkpoint")
        shards = [shard for _, tensors in sharded.tensors() for shard in tensors.values()]
        return shards + [box.memory for box in sharded.joint_state()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"


class ParameterOffload:
    """Hooks that programs such as trl remove and register again around a generation in ``GatheredParameters``.

    There are none: the hooks of the engine leave gathered weights as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: the hooks were not removed."""


class ZeROOptimizer(DeepSpeedOptimizer, StatePlacement):
    """The same with ZeRO 1, 2 or 3."""

    core = property(lambda self: self._engine)

    @property
    def parameter_offload(self) -> ParameterOffload:
        """Hooks of stage 3; the other stages have no such attribute, by which programs distinguish them."""
        if self._engine.config.parallel.dp_zero_stage != 3:
            raise AttributeError("parameter_offload exists with zero_optimization.stage 3 alone")
        return ParameterOffload(self._engine.module)


class HalfPrecisionOptimizer(DeepSpeedOptimizer):
    """The same at stage 0 with weights in 16 bits; DeepSpeed has three classes for them, which are this one here."""
