"""Groups of replicas in one process, one after the other: the reference of ``outer_steps``.

It shares no code with ``optimizer.outer``: each group is a run without groups, and the outer optimizer is written for
whole tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.datasets.loader import Batch, BatchLoader
from megatron_core.errors import ConfigError
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.optimizer.rule import write_copy
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult, train_step


class LoaderOfGroup(BatchLoader):
    """The batches of one of ``groups``: group g has the g-th part of the samples of each step."""

    group = 0
    groups = 1

    def step(self, consumed_samples: int, num_microbatches: int, length: int | None = None) -> list[Batch]:
        """See ``BatchLoader.step``; ``consumed_samples`` are those of this group."""
        local_samples = num_microbatches * self.micro_batch_size
        return super().step(consumed_samples * self.groups + self.group * local_samples, num_microbatches, length)

    def prefetch(self, consumed_samples: int, num_microbatches: int, length: int | None = None) -> None:
        """Read nothing ahead."""


class GroupsInOneProcess:
    """The runs of all groups of ``config`` and the global weights; ``prepare`` sets up a run without groups."""

    def __init__(self, config: RunConfig, prepare: Callable[[RunConfig], Run]) -> None:
        training = config.training
        groups = config.section(OuterConfig).outer_groups
        if config.optional("rampup_batch_size") is not None or training.global_batch_size is None:
            raise ConfigError(
                f"outer_groups={groups} is compared with one process for a constant global_batch_size; give "
                "--global-batch-size, without --rampup-batch-size"
            )
        batch = training.global_batch_size // groups
        size = gcd(training.micro_batch_size, batch)
        alone = replace(training, global_batch_size=batch, micro_batch_size=size, eval_global_batch_size=None)
        self.config = config.section(OuterConfig)
        without_groups = replace(config, training=alone).with_section(OuterConfig())
        self.runs = [prepare(without_groups) for _ in range(groups)]
        for number, run in enumerate(self.runs):
            base = run.train_loader
            run.train_loader = LoaderOfGroup(
                base.dataset, size, 0, 1, base.vocab_size, base.packing, num_workers=0, pin_memory=base.pin_memory
            )
            run.train_loader.group = number
            run.train_loader.groups = groups
        self._layers = config.model.num_layers
        self._steps = 0
        self.weights = {name: main.clone() for name, main in self._mains(self.runs[0])}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._in_flight: dict[str, tuple[int, list[Tensor]]] = {}
        """By parameter: the step at whose end the exchange is applied, and what each group has sent."""

    def step(self, hooks: Callable[[int], StepHooks]) -> list[StepResult]:
        """Take a step of each group, with ``hooks(group)``, and exchange what is due."""
        results = [train_step(run, hooks=hooks(number)) for number, run in enumerate(self.runs)]
        self._steps += 1
        for name in self.weights:
            self._exchange(name)
        return results

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        """Exchange a parameter, if it is due after this step."""
        outer = self.config
        mains = [dict(self._mains(run))[name] for run in self.runs]
        offset = self._fragment(name) * outer.outer_steps // outer.outer_fragments
        if (self._steps - offset) % outer.outer_steps == 0:
            sent = [self._rounded(self.weights[name] - main) for main in mains]
            self._in_flight[name] = self._steps + outer.outer_delay, sent
        if self._in_flight.get(name, (0, None))[0] != self._steps:
            return
        gradient = torch.stack(self._in_flight.pop(name)[1]).mean(0)
        self.momentum[name] = outer.outer_momentum * self.momentum[name] + gradient
        direction = gradient + outer.outer_momentum * self.momentum[name]
        self.weights[name] = self.weights[name] - outer.outer_lr * direction
        for run, main in zip(self.runs, mains, strict=True):
            main.copy_(outer.outer_alpha * main + (1 - outer.outer_alpha) * self.weights[name])
            for shard in run.optimizer.shards:
                write_copy(shard.whole)

    def global_weights(self) -> Iterator[tuple[str, nn.Parameter, int, int, Tensor]]:
        """Each global weight, as the argument of ``RankTrace.add_global``."""
        for shard in self.runs[0].optimizer.shards:
            for name, parameter, start, stop, _ in shard.bucket.pieces():
                yield name, parameter, start, stop, self.weights[name]

    def _fragment(self, name: str) -> int:
        """Layers in turn; the embedding is in the first fragment and the rest in the last."""
        if name.startswith("embedding."):
            return 0
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]) % self.config.outer_fragments
        return self.config.outer_fragments - 1

    def _rounded(self, gradient: Tensor) -> Tensor:
        """The gradient as it arrives: the nearest of all numbers that can be sent."""
        exchange = self.config.outer_exchange
        largest = gradient.abs().max()
        if exchange == "full" or not largest:
            return gradient
        if exchange == "bf16":
            return gradient.bfloat16().to(gradient.dtype)
        if exchange == "fp8":
            return (gradient / largest * 448).to(torch.float8_e4m3fn).to(gradient.dtype) / 448 * largest
        sizes = torch.tensor([0.0, *(2.0**-power for power in range(7))], dtype=gradient.dtype)
        nearest = (gradient.abs().view(-1, 1) / largest - sizes).abs().argmin(1)
        return (sizes[nearest] * largest).view_as(gradient) * gradient.sign()

    def _mains(self, run: Run) -> Iterator[tuple[str, Tensor]]:
        """The main weights of a run by name."""
        for shard in run.optimizer.shards:
            for name, parameter, _, _, offset in shard.bucket.pieces():
                yield name, shard.main[offset : offset + parameter.numel()]
