"""``pretrain`` with its callbacks on two simulated GPUs: a run that stops, saves and resumes ends with the bits of one
that does not stop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training import pretrain
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import stored
from tests.parity.context_rows import CP2
from tests.parity.moe_rows import ALL_GATHER, EP2, MIXTRAL
from tests.parity.rows import MODERN, PP2, SP, TP2, V2, ZB_V, ZERO, ZERO2, ZERO3
from tests.simulated_gpu.features import BASE, BF16, OFFLOAD, OVERLAP
from tests.simulated_gpu.runtime import simulated_gpu

BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
ASYNC = {"async_save": True}
CASES: dict[str, dict[str, Any]] = {
    "expert biases": EP2 | MIXTRAL | BF16 | BIASED,
    "all-gather dispatcher": EP2 | MIXTRAL | BF16 | ALL_GATHER,
    "tp2 sp": TP2 | SP | BF16 | MODERN | ASYNC | {"timing_log_level": 2},
    "pp2 chunks, zero1": PP2 | V2 | BF16 | ASYNC | {"num_layers": 4, "global_batch_size": 8},
    "pp2 zb_v": PP2 | ZB_V | BF16 | {"num_layers": 4, "global_batch_size": 8},
    "cp2": CP2 | BF16,
    "zero3 overlap": ZERO3 | OVERLAP | BF16 | ASYNC | {"log_norms_by_layer": True, "log_params_norm": True},
    "zero2 offload": ZERO2 | BF16 | OFFLOAD,
    "powersgd": ZERO | {"grad_compression": "powersgd"},
    "onebit adam": {"grad_compression": "onebit-adam"},
    "zero one adam": {"grad_compression": "zero-one-adam"},
    "muon": ZERO | BF16 | {"optimizer": "muon"},
    "soap": ZERO | BF16 | {"optimizer": "soap"},
    "outer steps": {"outer_groups": 2, "outer_steps": 2},
    "hashes, reruns": ZERO
    | BF16
    | {"record_hashes": True, "rerun_mode": "validate_results", "replica_check_interval": 1},
    "averages": ZERO | BF16 | {"ema_decay": 0.9},
    "delayed fp8": TP2 | BF16 | {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "cuda graphs": BF16 | {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1},
}
STEPS, STOP = 4, 2


def train(settings: dict[str, Any]) -> None:
    """Run ``pretrain`` in this rank."""
    parallel_state.destroy_model_parallel()
    module = sys.modules["megatron_core.training.pretrain"]
    joined = patch.object(module, "start_world", lambda *_, **__: None)  # ``run_ranks`` has joined the ranks
    with simulated_gpu(), joined:
        world = World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=torch.device("cuda", 0))
        pretrain(RunConfig.from_flat(settings), world)


def train_twice(settings: dict[str, Any], folder: str) -> None:
    """Without a stop, and in two runs."""
    common = BASE | {"train_iters": STEPS, "peak_tflops": 1.0, "save_interval": STOP, "eval_iters": 1} | settings
    train(common | {"save": f"{folder}/whole"})
    train(common | {"save": f"{folder}/parts", "exit_interval": STOP})
    assert not Path(folder, "parts", f"iter_{STEPS:07d}").exists()
    train(common | {"save": f"{folder}/parts", "load": f"{folder}/parts"})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("feature", CASES)
def test_a_resumed_run_ends_as_one_without_a_stop(feature: str, tmp_path: Path) -> None:
    run_ranks(2, train_twice, CASES[feature], str(tmp_path), timeout=300.0)
    expected, found = (stored(tmp_path / name / f"iter_{STEPS:07d}") for name in ("whole", "parts"))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
