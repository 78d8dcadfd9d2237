"""Programs with accelerate's plugin for DeepSpeed train with it on CPUs, on all ranks, however they are started.

Losses are compared with torch alone in one process.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands import launch
from accelerate.state import DistributedType

import megatron_core.drop_in  # noqa: F401 - adapts accelerate
from megatron_core.drop_in import accelerate_ranks
from megatron_core.drop_in.cpu_start import DEVICES
from megatron_core.errors import ConfigError
from tests.programs import run_ranks_of

PROGRAM = """
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState

if "early" in sys.argv:
    PartialState()
plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
accelerator = Accelerator(deepspeed_plugin=plugin, cpu="cpu" in sys.argv)
with accelerator.main_process_first():
    torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
x = torch.linspace(-1, 1, 64).view(16, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for epoch in range(2):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
if accelerator.is_main_process:
    print(type(model).__module__, accelerator.num_processes, accelerator.distributed_type.value, *losses)
"""


def _train_alone() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64).view(16, 4)
    losses = []
    for step in range(4):
        inputs = x[8 * (step % 2) :][:8]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


STARTS = {
    "no launcher": ("python -m megatron_core.drop_in", "", 1),
    "no launcher, cpu=True": ("python -m megatron_core.drop_in", "cpu", 1),
    "one rank": ("torchrun --nproc-per-node 1 -m megatron_core.drop_in", "", 1),
    "two ranks": ("torchrun --nproc-per-node 2 -m megatron_core.drop_in", "", 2),
    "two ranks, cpu=True": ("torchrun --nproc-per-node 2 -m megatron_core.drop_in", "cpu", 2),
    "two ranks, state made before": ("torchrun --nproc-per-node 2 -m megatron_core.drop_in", "early", 2),
    "two ranks, --cpu": ("torchrun --nproc-per-node 2 -m megatron_core.drop_in --cpu", "", 2),
}


@pytest.mark.every_case
@pytest.mark.parametrize("start", STARTS)
def test_every_start_trains_with_deepspeed(start: str, tmp_path: Path) -> None:
    launcher, word, ranks = STARTS[start]
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_ranks_of(f"{launcher} {tmp_path / 'program.py'} {word}")
    _check(done.stdout, done.stderr, ranks)


def test_accelerate_launch_with_cpu_trains_with_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerate launch --cpu`` sets this variable."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_ranks_of(f"python -m megatron_core.drop_in {tmp_path / 'program.py'}")
    _check(done.stdout, done.stderr, 1)


def _check(output: str, errors: str, ranks: int) -> None:
    lines = [line.split() for line in output.splitlines() if line.startswith("deepspeed.")]
    assert lines, output + errors
    assert lines[0][:3] == ["deepspeed.runtime.engine", str(ranks), "DEEPSPEED"]
    assert [float(loss) for loss in lines[0][3:]] == pytest.approx(_train_alone(), rel=1e-5)


def test_deepspeed_that_accelerate_launch_leaves_out_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 1\nnum_machines: 1\n"
        "mixed_precision: 'no'\nuse_cpu: false\ndeepspeed_config:\n  zero_stage: 2\n"
    )
    arguments = launch.launch_command_parser().parse_args(["--cpu", "--config_file", str(config), "program.py"])
    with pytest.raises(ConfigError, match="accelerate launch --cpu starts the program without the deepspeed"):
        launch.launch_command(arguments)


def test_a_gpu_that_cpu_would_hide_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    initialize = accelerate_ranks._with_deepspeed_on_cpus(lambda self, cpu=False: None)
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES='' to train on the CPU"):
        initialize(SimpleNamespace(), cpu=True)


def test_a_plugin_for_fsdp_finds_a_device_with_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES, "")
    monkeypatch.setattr("accelerate.utils.dataclasses.is_cuda_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    accelerate_ranks._patch_plugins()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, sync_module_states=True)
    layer = torch.nn.Linear(2, 2, device="meta")
    assert plugin.param_init_fn is not None
    plugin.param_init_fn(layer)
    assert layer.weight.device.type == "cpu"


def test_a_plugin_for_megatron_that_accelerate_ignores_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setattr("accelerate.utils.megatron_lm.mpu", None, raising=False)
    initialize = accelerate_ranks._checked(lambda self: None)
    initialize(SimpleNamespace(distributed_type=DistributedType.MEGATRON_LM))
    with pytest.raises(ConfigError, match="ignores its MegatronLMPlugin for the distributed type NO; start the ranks"):
        initialize(SimpleNamespace(distributed_type=DistributedType.NO))


def test_a_plugin_for_megatron_after_a_plain_import_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import accelerate\naccelerate.Accelerator(megatron_lm_plugin=accelerate.utils.MegatronLMPlugin())\n"
    )
    done = run_ranks_of(f"python -m megatron_core.drop_in {tmp_path / 'program.py'}")
    assert done.returncode != 0
    assert "accelerate was imported without ACCELERATE_USE_MEGATRON_LM=true" in done.stderr


LOCAL_RANK = """
import os

import deepspeed
from deepspeed.accelerator import get_accelerator

deepspeed.init_distributed(distributed_port=DISTRIBUTED_PORT)
get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")))
"""


def test_one_process_without_a_launcher_gets_the_variables_of_one(tmp_path: Path) -> None:
    """As from DeepSpeed's discovery of MPI: DeepSpeedExamples' cifar10_deepspeed.py reads LOCAL_RANK."""
    (tmp_path / "program.py").write_text(LOCAL_RANK.replace("DISTRIBUTED_PORT", "29501"))
    done = run_ranks_of(f"python -m megatron_core.drop_in {tmp_path / 'program.py'}")
    assert done.stdout == "0 1 0 127.0.0.1 29501\n", done.stderr
