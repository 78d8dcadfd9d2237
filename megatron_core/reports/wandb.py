"""Metrics for Weights & Biases with the tags of TensorBoard."""

import importlib

from megatron_core.errors import ConfigError, first_line
from megatron_core.monitor.build import SinkContext
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.output_file import make_folder
from megatron_core.reports.settings import WandbConfig
from megatron_core.reports.tensorboard import scalars


class WandbSink:
    """Logs every step to the project of ``--wandb-project``; ``WANDB_MODE=offline`` keeps it on this machine."""

    setting = "wandb_project"

    def __init__(self, context: SinkContext) -> None:
        """Start a run; its files are in ``wandb_save_dir``, by default ``wandb`` in the folder of the checkpoints."""
        config = context.config.section(WandbConfig)
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"wandb_project={config.wandb_project} needs the package wandb; pip install wandb, or remove the flag"
            ) from error
        folder = config.wandb_save_dir or (None if context.folder is None else str(context.folder / "wandb"))
        if folder is not None:
            make_folder(folder)
        names = {"project": config.wandb_project, "name": config.wandb_exp_name, "entity": config.wandb_entity}
        try:
            self._run = wandb.init(**names, dir=folder, config=dict(context.logged))
        except Exception as error:  # various types: no login, no network, an illegal name
            raise ConfigError(
                f"wandb_project={config.wandb_project}: Weights & Biases cannot start a run ({first_line(error)}); log "
                "in with wandb login, set WANDB_MODE=offline to keep the run on this machine, or remove the flag"
            ) from error

    def on_step(self, event: StepEvent) -> None:
        """Log one step."""
        values = {name: value for name, value in scalars(event).items() if value is not None}
        self._run.log({**values, "samples": event.consumed_samples}, step=event.iteration)

    def on_validation(self, event: ValidationEvent) -> None:
        """Log one evaluation."""
        self._run.log(event.scalars, step=event.iteration)

    def close(self) -> None:
        """Upload pending data and end the run."""
        self._run.finish()
