"""Train on a Ray cluster: a ``TorchTrainer`` whose workers call ``pretrain``, with restarts after lost workers.

    pip install "megatron-native[ray]"
    python examples/ray_train.py --workers 16 --use-gpu --storage /shared/runs --name gpt -- \
      --config examples/gpt_1b.yaml --data-path /shared/corpus_text_document --tokenizer-model /shared/tokenizer.json \
      --save-interval 500

The flags after -- are those of megatron-train. Checkpoints are in STORAGE/NAME/checkpoints, on a file system that all
machines share, or in object storage; Ray stores a small file that names the newest one, with the metrics of its step.
After a failure of a worker or a machine, Ray starts all workers again, and they resume from the newest checkpoint; the
same command resumes after the loss of the driver.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_context, report
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import get_address_and_port

from megatron_core.config.cli import parse_command_line
from megatron_core.parallel import World
from megatron_core.training import pretrain
from megatron_core.training.callbacks import Callback
from megatron_core.training.step import StepResult


class RanksOnly(Backend):
    """Connects the workers only: ``pretrain`` creates the process groups of its layout itself."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Give all workers the address of rank 0."""
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(set_address, address, port)

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Nothing: the workers end."""


def set_address(address: str, port: int) -> None:
    """Runs on each worker."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


class RanksConfig(TorchConfig):
    """Selects ``RanksOnly``."""

    @property
    def backend_cls(self) -> type[RanksOnly]:
        """See ``TorchConfig``."""
        return RanksOnly


class ReportToRay(Callback):
    """Reports the metrics of each step to Ray, and each checkpoint with the step after which it was written."""

    def after_step(self, result: StepResult) -> None:
        """Remember the metrics."""
        self._metrics = {
            "iteration": self.run.state.iteration,
            "loss": float(result.loss),
            "grad_norm": float(result.grad_norm),
            "consumed_samples": self.run.state.consumed_samples,
        }
        if self._metrics["iteration"] % self.run.config.monitor.log_interval == 0:
            report(self._metrics)

    def after_save(self, temporary: bool, saved: bool) -> None:
        """Report the checkpoint."""
        if temporary or not saved:
            return
        place = {"checkpoints": self.run.config.checkpoint.save, "iteration": self.run.state.iteration}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "checkpoint.json").write_text(json.dumps(place))
            report(self._metrics, checkpoint=Checkpoint.from_directory(folder))


def train_worker(settings: dict[str, Any]) -> None:
    """The function of each worker."""
    context = get_context()
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
    }
    config, _ = parse_command_line(settings["flags"], prog="ray_train.py")
    pretrain(config, World.from_environment(), callbacks=[ReportToRay()])


def main() -> None:
    """Parse the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of ranks")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU for each rank")
    parser.add_argument("--storage", required=True, help="folder or URL that all machines share")
    parser.add_argument("--name", default="pretrain", help="name of the run in STORAGE")
    parser.add_argument("--failures", type=int, default=100, help="number of failures after which the run ends")
    parser.add_argument("flags", nargs="+", help="flags of megatron-train, after --")
    flags = parser.parse_args()
    checkpoints = f"{flags.storage.rstrip('/')}/{flags.name}/checkpoints"
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"flags": [*flags.flags, "--save", checkpoints, "--load", checkpoints]},
        torch_config=RanksConfig(),
        scaling_config=ScalingConfig(num_workers=flags.workers, use_gpu=flags.use_gpu),
        run_config=RunConfig(
            name=flags.name, storage_path=flags.storage, failure_config=FailureConfig(max_failures=flags.failures)
        ),
    )
    result = trainer.fit()
    print(json.dumps(result.metrics))


if __name__ == "__main__":
    ray.init()
    main()
