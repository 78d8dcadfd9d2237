"""Scalars of a run in TensorBoard, Weights & Biases and CSV files; rank 0 writes them."""

import csv
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed.runtime.config_utils import DeepSpeedConfigModel, section_as
from megatron_core.errors import ConfigError

JOB_NAME = "DeepSpeedJobName"
Event = tuple[str, Any, int]
"""Name, value and number of samples so far."""


class TensorBoardConfig(DeepSpeedConfigModel):
    """The section ``tensorboard``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = JOB_NAME


class CSVConfig(DeepSpeedConfigModel):
    """The section ``csv_monitor``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = JOB_NAME


class WandbConfig(DeepSpeedConfigModel):
    """The section ``wandb``."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The sections of all monitors."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: CSVConfig = CSVConfig()
    wandb: WandbConfig = WandbConfig()

    @property
    def enabled(self) -> bool:
        """Whether a monitor is enabled."""
        return any(getattr(self, name).enabled for name in type(self).model_fields)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the sections of monitors in a JSON configuration."""
    sections: dict[str, Any] = {name: param_dict.get(name) or {} for name in DeepSpeedMonitorConfig.model_fields}
    return section_as(DeepSpeedMonitorConfig, "", sections)


def _module(name: str, section: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.rpartition(".")[2]
        raise ConfigError(f"{section}.enabled=true needs the package {package}: pip install {package}") from error


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


class Monitor:
    """Base class: keeps the keys of its section as attributes, and writes on rank 0 if it is enabled."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        vars(self).update(monitor_config.model_dump())
        self.is_writing = monitor_config.enabled and _is_first()
        if self.is_writing:
            self._open()

    def _open(self) -> None:
        pass

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write each (name, value, samples)."""
        for event in event_list if self.is_writing else ():
            self._write(*event)

    def _write(self, name: str, value: Any, samples: int) -> None:
        raise NotImplementedError


class TensorBoardMonitor(Monitor):
    """Writes into the folder ``output_path/job_name``."""

    summary_writer: Any = None

    def _open(self) -> None:
        writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.summary_writer = writer(str(Path(self.monitor_config.output_path, self.monitor_config.job_name)))

    def _write(self, name: str, value: Any, samples: int) -> None:
        self.summary_writer.add_scalar(name, value, samples)
        self.summary_writer.flush()


class WandbMonitor(Monitor):
    """Writes into a run of Weights & Biases."""

    def _open(self) -> None:
        config = self.monitor_config
        self._wandb = _module("wandb", "wandb")
        self._wandb.init(project=config.project, group=config.group, entity=config.team)

    def _write(self, name: str, value: Any, samples: int) -> None:
        self._wandb.log({name: value}, step=samples)


class csvMonitor(Monitor):
    """Writes a file ``output_path/job_name/NAME.csv`` for each name, with the columns step and NAME."""

    def _open(self) -> None:
        self.log_dir = Path(self.monitor_config.output_path, self.monitor_config.job_name)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._begun: set[Path] = set()

    def _write(self, name: str, value: Any, samples: int) -> None:
        path = self.log_dir / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        with path.open("a", newline="") as file:
            rows = csv.writer(file)
            if path not in self._begun:
                self._begun.add(path)
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([samples, value])


class MonitorMaster(Monitor):
    """All monitors of a configuration."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write each (name, value, samples) with every monitor."""
        events = list(event_list)
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor):
            monitor.write_events(events)
