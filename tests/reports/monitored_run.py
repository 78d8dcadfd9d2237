"""A training whose loss or experts fail on demand, for `tests.reports.monitoring_servers`.

python -m tests.reports.monitored_run FOLDER FLAGS...

While FOLDER/spike exists the weights of the output layer are noise; while FOLDER/collapse exists the first two experts
of each layer get all tokens.
"""

import sys
from pathlib import Path

import torch

from megatron_core.config.cli import parse_command_line
from megatron_core.parallel import World
from megatron_core.training import pretrain
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run


class Faults(Callback):
    """Plants the faults."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def before_run(self) -> None:
        """Find the weights."""
        run = self.run
        assert isinstance(run, Run)
        (model,) = run.stages.values()
        self._output = model.output_layer.weight.data
        self._biases = [layer.mlp.router.expert_bias.data for layer in model.decoder.layers.values()]

    def before_step(self) -> None:
        """Plant what the folder asks for."""
        if (self._folder / "spike").exists():
            torch.nn.init.normal_(self._output, std=1.0)
        if (self._folder / "collapse").exists():
            for bias in self._biases:
                bias[:2] = 100.0


def main() -> None:
    """Train."""
    folder, *flags = sys.argv[1:]
    config, _ = parse_command_line(flags, prog="monitored_run")
    pretrain(config, World.from_environment(), callbacks=[Faults(Path(folder))])


if __name__ == "__main__":
    main()
