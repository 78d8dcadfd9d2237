"""Metrics for Weights & Biases with the tags of TensorBoard."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_core.config.monitor import MonitorConfig
from megatron_core.errors import ConfigError, first_line
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.monitor.tensorboard import scalars
from megatron_core.output_file import make_folder


class WandbSink:
    """Logs every step to the project of ``--wandb-project``; ``WANDB_MODE=offline`` keeps it on this machine."""

    setting = "wandb_project"

    def __init__(self, config: MonitorConfig, save_dir: str | Path | None, settings: Mapping[str, Any]) -> None:
        """Start a run with ``settings``; its files are in ``wandb_save_dir``, by default ``wandb`` in ``save_dir``."""
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"wandb_project={config.wandb_project} needs the package wandb; pip install wandb, or remove the flag"
            ) from error
        folder = config.wandb_save_dir or (None if save_dir is None else str(Path(save_dir) / "wandb"))
        if folder is not None:
            make_folder(folder)
        names = {"project": config.wandb_project, "name": config.wandb_exp_name, "entity": config.wandb_entity}
        try:
            self._run = wandb.init(**names, dir=folder, config=dict(settings))
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
