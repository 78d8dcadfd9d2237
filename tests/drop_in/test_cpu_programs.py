"""Programs for GPUs of users of torch alone, with ``--cpu``: DDP in spawned processes, and FSDP with offload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.drop_in.test_cpu_mode import run
from tests.drop_in.test_launcher import python
from tests.programs import free_port

SPAWN = """
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=FREE)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).to(rank), device_ids=[rank])
    model(torch.ones(2, 3, device=f"cuda:{rank}")).sum().backward()
    print(torch.cuda.is_available(), torch.cuda.device_count(), dist.get_backend(), model.module.weight.grad.tolist())

if __name__ == "__main__":
    mp.spawn(train, (1,), nprocs=1)
"""


def test_spawned_processes_run_on_the_cpu_too(tmp_path: Path) -> None:
    """One process: each imports torch, which takes seconds."""
    program = tmp_path / "program.py"
    program.write_text(SPAWN.replace("FREE", repr(str(free_port()))))
    done = python("-m", "megatron_core.drop_in", "--cpu=2", program)
    assert done.stdout.splitlines()[-1:] == ["True 2 gloo [[2.0, 2.0, 2.0]]"], done.stderr


FSDP = """
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
# wrap
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.linspace(-1, 1, 20, device="cuda").view(4, 5)[2 * rank : 2 * rank + 2] + step
    model(x).pow(2).mean().backward()
    # clip
    optimizer.step()
    optimizer.zero_grad()
# state
if rank == 0:
    print(json.dumps({name: tensor.tolist() for name, tensor in state.items()}))
"""
WRAP_1 = """
for weight in model.parameters():
    weight.data += rank  # rank 0 sends its weights
model = FSDP(
    model,
    auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    cpu_offload=CPUOffload(offload_params=True),
    device_id=torch.cuda.current_device(),
    sharding_strategy=ShardingStrategy.STRATEGY,
    sync_module_states=True,
    use_orig_params=ORIGINAL,
)
"""
STATE_1 = """
whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
    state = model.state_dict()
"""
WRAP_2 = """
for part in (*model, model):
    fully_shard(part, offload_policy=CPUOffloadPolicy())
"""
STATE_2 = "state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}"
KINDS = {
    "original parameters": (WRAP_1.replace("STRATEGY", "FULL_SHARD").replace("ORIGINAL", "True"), STATE_1),
    "flat parameters": (WRAP_1.replace("STRATEGY", "FULL_SHARD").replace("ORIGINAL", "False"), STATE_1),
    "without shards": (WRAP_1.replace("STRATEGY", "NO_SHARD").replace("ORIGINAL", "True"), STATE_1),
    "gathered once": (WRAP_1.replace("STRATEGY", "SHARD_GRAD_OP").replace("ORIGINAL", "True"), STATE_1),
    "fully_shard": (WRAP_2, STATE_2),
}


def _train_alone() -> dict[str, torch.Tensor]:
    """The same training in one process without FSDP."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 20).view(4, 5) + step).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp_that_offloads_has_the_weights_of_one_process(kind: str, tmp_path: Path) -> None:
    wrap, state = KINDS[kind]
    clip = "model.clip_grad_norm_(0.5)"
    if kind == "fully_shard":
        clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
    text = FSDP.replace("# wrap", wrap).replace("# state", state).replace("# clip", clip)
    (line,) = run(text, tmp_path, ranks=2)
    weights = json.loads(line)
    for name, expected in _train_alone().items():
        torch.testing.assert_close(torch.tensor(weights[name]), expected, rtol=0, atol=1e-5)
