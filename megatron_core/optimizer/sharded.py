"""The optimizer step on flat shards of main weights."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.config import OptimizerConfig
from megatron_core.config.optimizers import AVERAGE
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.data_parallel.settings import BucketKind
from megatron_core.errors import ConfigError
from megatron_core.ops import Backend
from megatron_core.optimizer.algorithms import update_rule
from megatron_core.optimizer.clip import GradientNorm, clip_factor
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.rule import BucketAlgorithm, Rates, ShardSlice
from megatron_core.optimizer.shard import JointAlgorithm, Shard, ShardUpdates, UpdateJob
from megatron_core.parallel.groups import ParallelGroups


class Optimizer:
    """Update this rank's shard of every bucket: ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1).

    16-bit weights have float32 main weights; wider weights are updated directly. The state is on the device of the
    weights, or where the ``memory`` of ``data_parallel`` places it.
    """

    updates_on_host = True
    """Whether the update of state in host memory runs there, so that gradients can be sent before it."""

    def __init__(
        self,
        data_parallel: DataParallel,
        config: OptimizerConfig,
        groups: ParallelGroups,
        loss_scale: LossScale,
        backend: Backend = "auto",
        seed: int = 0,
        *,
        width: float = 1.0,
        param_groups: Sequence[dict[str, Any]] = (),
    ) -> None:
        """``seed``: seed of stochastic rounding. ``width``: model width / base width (``--use-mup``).

        ``param_groups``: if not empty, the groups together have all parameters as ``params``. Each step then uses
        ``lr``, ``weight_decay``, ``eps``, ``betas`` and ``momentum`` (SGD) of the groups instead of its arguments and
        the configuration.
        """
        self.seed = seed
        self.width = width
        self.param_groups = param_groups
        self.config = config
        self.loss_scale = loss_scale
        self.backend = backend
        self.norm = GradientNorm(data_parallel, groups, backend)
        self.compressor = data_parallel.compressor
        # One rule for each kind, because rules may keep state of their own.
        algorithms = {row.name: update_rule(row)(config, backend, groups) for row in config.kinds}
        if self.compressor is not None:
            algorithms = {name: self.compressor.update_rule(rule, groups) for name, rule in algorithms.items()}
        # Allocate the state here, so that a checkpoint can be loaded before the first step.
        self.shards = []
        placements = data_parallel.memory.state_placements(data_parallel.buckets)
        for bucket, placement in zip(data_parallel.buckets, placements, strict=True):
            row = config.kind_of(hidden=bucket.kind.is_hidden_matrix)
            self.shards.append(Shard.of(bucket, row, algorithms[row.name], placement, config))
        if self.compressor is not None:
            self.compressor.attach(self.shards, lambda: self.loss_scale.scale)
        self._joint = next((rule for rule in algorithms.values() if isinstance(rule, JointAlgorithm)), None)
        """The rule of hidden matrices, if it updates them together."""
        if self._joint is not None:
            self._joint.attach([shard for shard in self.shards if shard.algorithm is self._joint], seed)
        # The average begins with the initial weights and not with zeros, so it needs no correction for its first steps.
        self.start_averages()
        self.steps_taken = 0
        self.before_update: Callable[[], None] = lambda: None
        """Called before weights and state change, for example to finish an asynchronous copy."""
        self.after_update: list[Callable[[], None]] = []
        """Called after the shards are updated, and before the weights of other ranks are gathered."""
        # Once: groups and shards do not change, and a step only fills in its rates.
        self._runs = self._runs_by_group()
        self._updates: ShardUpdates = (data_parallel.memory.updates or ShardUpdates)()
        # Gradients travel to host memory while the backward of other layers runs.
        sending = {shard.bucket: shard for shard in self.shards if shard.sends_gradient}
        if sending and self.updates_on_host:
            data_parallel.on_final = lambda bucket: self._updates.send(sending[bucket]) if bucket in sending else None

    def use_groups(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Take the rates of each step from ``param_groups`` from now on, as described in the constructor."""
        self.param_groups = param_groups
        self._runs = self._runs_by_group()

    def gradient_norm(self) -> Tensor:
        """Return the global norm of the reduced gradients, without the loss scale, a float64 scalar on the device.

        It is inf or nan if any gradient on any rank is.
        """
        # Divided here and not in the gradients: scaling them would be a pass over memory.
        return self.norm.compute() / self.loss_scale.scale

    def step(
        self,
        lr: float,
        grad_norm: float,
        decoupled_lr: float | None = None,
        weight_decay: float | None = None,
        *,
        skip: bool = False,
    ) -> bool:
        """Clip gradients of norm ``grad_norm``, the result of ``gradient_norm()``, and update the weights.

        The update is skipped if ``skip`` is True or ``grad_norm`` is not finite. ``decoupled_lr``: separate learning
        rate of embedding and output layer; ``weight_decay``: value for this step if it varies. Returns whether the step
        was skipped. The gradients may be scaled in place.
        """
        # Update the loss scale and decide whether to skip the step.
        scale = self.loss_scale.scale
        # The norm is the same on all ranks, so all of them skip or none.
        finite = math.isfinite(grad_norm)
        self.loss_scale.update(not finite)
        if skip or not finite:
            if self.compressor is not None:
                self.compressor.discard()
            self._updates.settle()
            return True
        # Only now: an asynchronous checkpoint may still read the weights.
        self.before_update()
        self.set_steps_taken(self.steps_taken + 1)
        # Clip by norm, through a factor, and by value, in place.
        factor = clip_factor(grad_norm, self.config.clip_grad) / scale
        if self.compressor is not None:
            self.compressor.commit(factor, self.config.clip_grad_value)
        # Values are clamped after unscaling, so the factor has to be applied first.
        if self.config.clip_grad_value > 0.0:
            self._updates.settle()
            for shard in self.shards:
                shard.bucket.grad_shard.mul_(factor).clamp_(-self.config.clip_grad_value, self.config.clip_grad_value)
            factor = 1.0
        self._update_all(lr, decoupled_lr, weight_decay, factor)
        for call in self.after_update:
            call()
        self._update_averages()
        return False

    def _update_averages(self) -> None:
        """e = d e + (1 - d) w, with the main weights w of each shard."""
        if self.config.ema_decay is None:
            return
        for shard in self.shards:
            average = shard.state[AVERAGE.name]
            average.lerp_(shard.main.to(average.dtype), 1.0 - self.config.ema_decay)

    def start_averages(self) -> None:
        """Set the averages to the main weights, which were loaded or changed outside of ``step``."""
        for shard in self.shards if self.config.ema_decay is not None else ():
            shard.state[AVERAGE.name].copy_(shard.main)

    def _update_all(self, lr: float, decoupled_lr: float | None, weight_decay: float | None, factor: float) -> None:
        """Update each group of runs with its own rates; ``factor`` is the factor of the gradients.

        Shards on the device of their weights are updated together, then all others in sequence.
        """
        # Rules that need whole tensors, such as LAMB, move all of a bucket after its directions are known.
        by_bucket = [shard for shard in self.shards if isinstance(shard.algorithm, BucketAlgorithm)]
        scaled: dict[Shard, list[tuple[slice, Rates]]] = {shard: [] for shard in by_bucket}
        by_element: list[tuple[list[tuple[Shard, slice]], Rates]] = []
        jointly: dict[Bucket, Rates] = {}
        for (group, _, _), runs in self._runs.items():
            if isinstance(group, int):
                options = self.param_groups[group]
                settings = float(options["lr"]), float(options["weight_decay"]), factor, options["eps"]
                rates = Rates(self.steps_taken, *settings, options.get("betas"), options.get("momentum"))
            else:
                own_lr = lr if decoupled_lr is None or not group.embedding else decoupled_lr
                decay = (self.config.weight_decay if weight_decay is None else weight_decay) * group.decay
                by_width = self.width != 1.0 and not (group.embedding and decoupled_lr is not None)
                scale, eps_scale = self._width_factors(runs[0][0]) if by_width else (1.0, 1.0)
                rates = Rates(self.steps_taken, own_lr * scale, decay, factor, self.config.adam_eps * eps_scale)
            if runs[0][0].algorithm is self._joint:
                jointly.update({shard.bucket: rates for shard, _ in runs})
            else:
                by_element.append((runs, rates))
            for shard, span in runs:
                if shard in scaled:
                    scaled[shard].append((span, rates))

        def update_by_element() -> None:
            jobs: list[UpdateJob] = []
            for runs, rates in by_element:
                # One call for all shards: a launch updates them together.
                if pieces := [shard.part(span) for shard, span in runs if shard.is_updated_in_place]:
                    runs[0][0].algorithm.update(pieces, rates)
                jobs += [
                    UpdateJob(shard, chunk, rates)
                    for shard, run in runs
                    if not shard.is_updated_in_place
                    for chunk in shard.chunks(run)
                ]
            # In the order of buckets, in which offloaded state is read ahead.
            order = {shard: number for number, shard in enumerate(self.shards)}
            self._updates.run(sorted(jobs, key=lambda job: order[job.shard]), self._update_part)

        if self._joint is None:
            update_by_element()
        else:
            self._joint.update_shards(jointly, meanwhile=update_by_element)
        # Ranks with common tied weights sum their norms in one order.
        for shard, spans in sorted(scaled.items(), key=lambda item: item[0].bucket.names):
            assert isinstance(shard.algorithm, BucketAlgorithm)
            shard.algorithm.finish_bucket(shard.bucket, shard.whole, spans)

    @property
    def has_local_changes(self) -> bool:
        """Whether the weights of data-parallel ranks differ, because an update rule has not synchronized them."""
        return any(shard.algorithm.has_local_changes(shard.bucket) for shard in self.shards)

    def synchronize(self) -> None:
        """Synchronize the weights of data-parallel ranks after local steps; a collective call.

        Call this before weights or state are read or saved, because other functions expect equal replicas.
        """
        if self.has_local_changes:
            self.before_update()
        for shard in self.shards:
            shard.algorithm.synchronize(shard.bucket, shard.whole)

    def forget_local_changes(self) -> None:
        """Drop the local steps: weights and state have been loaded from a checkpoint."""
        for shard in self.shards:
            shard.algorithm.forget_local_changes()

    def _width_factors(self, shard: Shard) -> tuple[float, float]:
        return shard.kind.width_factors(self.width, hidden=shard.bucket.kind.is_hidden_matrix)

    def _runs_by_group(self) -> dict[tuple[int | BucketKind, torch.dtype, int], list[tuple[Shard, slice]]]:
        """Return runs of elements by (parameter group or traits, dtype, algorithm); all runs of a key share rates."""
        group_of = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        runs = defaultdict(list)
        for shard in self.shards:
            bucket = shard.bucket.kind
            # Only what rates depend on; buckets that differ in other properties share a launch.
            traits = BucketKind(bucket.dtype, bucket.decay, bucket.matrix, (), embedding=bucket.embedding)
            spans = list(_spans(shard, group_of)) if self.param_groups else [(0, shard.main.numel(), traits)]
            for start, stop, group in spans:
                runs[group, shard.bucket.weights.dtype, id(shard.algorithm)].append((shard, slice(start, stop)))
        return runs

    def _update_part(self, job: UpdateJob, piece: ShardSlice) -> None:
        """Update a slice of a shard that is not updated together with others."""

        def update(piece: ShardSlice) -> None:
            job.shard.algorithm.update([piece], job.rates)

        job.shard.update(job.span, piece, job.rates, self.seed, update)

    def tensors(self) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
        """Yield each bucket with its flat state.

        The state consists of the optimizer's moments (``exp_avg`` and ``exp_avg_sq`` for AdamW) and, for 16-bit
        weights, ``main``. ``joint_state`` has the state that is not of a shard.
        """
        for shard in self.shards:
            yield shard.bucket, shard.state | ({"main": shard.main} if shard.is_narrow else {})

    def joint_state(self) -> Iterator[TensorBox]:
        """Yield state that only this rank has, of a rule that updates shards together; see ``JointAlgorithm``."""
        return iter(()) if self._joint is None else self._joint.joint_state()

    def set_steps_taken(self, steps: int) -> None:
        """Set the step count for AdamW's bias correction and the warm-up of compression."""
        self.steps_taken = steps
        if self.compressor is not None:
            self.compressor.step = steps


def _spans(shard: Shard, group_of: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, group) for maximal runs of one group in a shard; a shard with a joint rule is one run."""
    if isinstance(shard.algorithm, JointAlgorithm):
        groups = {group_of[id(parameter)] for parameter in shard.bucket.parameters}
        if len(groups) > 1:
            raise ConfigError(
                f"optimizer={shard.kind.name}: hidden matrices of one bucket need the same settings; override others"
            )
        yield 0, shard.main.numel(), groups.pop()
        return
    run: tuple[int, int, int] | None = None
    for _, parameter, start, stop, offset in shard.bucket.pieces():
        group = group_of[id(parameter)]
        if run is not None and run[2] != group:
            yield run
            run = None
        run = (offset if run is None else run[0], offset + stop - start, group)
    if run is not None:
        yield run
