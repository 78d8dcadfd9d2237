"""Repeat a recorded bad step in one process, and find the values that are not finite, for megatron-replay-step."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_core.config import CheckpointConfig, ParallelConfig, RunConfig
from megatron_core.parallel import World
from megatron_core.parallel.texts import listed
from megatron_core.training.compatibility import stored_config
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step


def config_of(folder: Path) -> RunConfig:
    """The run's configuration for one process that loads the weights in ``folder`` and writes nothing."""
    config = stored_config(folder)
    monitor = RunConfig.from_flat({"record_times": False}).monitor
    return replace(
        config,
        parallel=ParallelConfig(),
        checkpoint=CheckpointConfig(load=str(folder), no_load_optim=True),
        monitor=monitor,
    )


class Finder:
    """Finds the first module whose output is not finite, and the gradients that are not."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.module = ""
        self.gradients = list[str]()
        for stage in run.stages.values():
            for name, module in stage.named_modules():
                module.register_forward_hook(lambda _, __, output, name=name: self._look(name, output))

    def _look(self, name: str, output: object) -> None:
        if not self.module and isinstance(output, Tensor) and not is_finite(output):
            self.module = name or "the whole model"

    def look_at_gradients(self) -> None:
        """Check the gradients after they are complete."""
        self.gradients = [name for name, p in self.parameters() if not is_finite(p.main_grad)]  # type: ignore[attr-defined]  # of data_parallel

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters of the model."""
        return [
            pair for stage in self.run.stages.values() for pair in stage.named_parameters() if pair[1].requires_grad
        ]


def is_finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    return not x.is_floating_point() or bool(torch.isfinite(x).all())


def replay(folder: Path) -> bool:
    """Repeat the step and print its results; returns whether loss and gradients are finite."""
    world = World(0, 1, 0, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    run = set_up(config_of(folder), world)
    finder = Finder(run)
    weights = [name for name, parameter in finder.parameters() if not is_finite(parameter)]
    result = train_step(run, hooks=StepHooks(before_update=finder.look_at_gradients, is_bad=lambda loss, norm: True))
    size = result.size
    print(f"iteration {run.state.iteration}, samples {size.consumed_samples} to {size.end - 1}")
    print(f"loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}")
    for what, names in (("weights", weights), ("gradients", finder.gradients)):
        print(f"{what} that are not finite: {listed(names) if names else 'none'}")
    print(f"the first module whose output is not finite: {finder.module or 'none'}")
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)
