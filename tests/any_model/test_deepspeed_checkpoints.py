"""Training continues from checkpoints of DeepSpeed with the losses of DeepSpeed itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_core
from megatron_core.any_model import Engine
from megatron_core.errors import CheckpointError
from megatron_core.hub.deepspeed import read_deepspeed_checkpoint
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.hub.deepspeed.network import BATCH, LLAMA, STEPS_AFTER, STEPS_BEFORE, Network, batch, groups, tokens
from tests.hub.hf_models import transformers

FOLDER = Path(__file__).parents[1] / "hub" / "deepspeed"
CHECKPOINTS = FOLDER / "checkpoints"
REFERENCE = Path(sys.prefix).resolve() / "reference"
BETAS = (0.8, 0.9)
CASES = [
    *(("stage0_fp32", 1, 0), ("stage0_bf16", 2, 1), ("stage1_fp32", 2, 3), ("stage1_bf16", 2, 2)),
    *(("stage1_fp32_universal", 2, 2), ("stage2_fp32", 1, 0), ("stage2_bf16", 2, 3), ("stage2_fp16", 1, 0)),
    *(("stage3_fp32", 2, 1), ("stage3_bf16", 1, 0), ("stage3_fp32_universal", 2, 3)),
]
"""Checkpoint, number of ranks here, ZeRO stage here."""
TOLERANCE = {"fp32": 5e-7, "bf16": 1e-2, "fp16": 1e-3}
"""Largest relative difference of losses: rounding in float32, and gradients that DeepSpeed sums in 16 bits."""


class Warmup:
    """The multiplication of rates by DeepSpeed's WarmupLR, logarithmic over 5 steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.last = optimizer, 0

    def step(self) -> None:
        self.last += 1
        share = min(1.0, float(torch.tensor(self.last + 1.0).double().log() / torch.tensor(5.0).double().log()))
        for group, rate in zip(self.optimizer.param_groups, (0.02, 0.01), strict=True):
            group["lr"] = rate * share

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last_batch_iteration"]


def engine_of(dtype: str, ranks: int, stage: int) -> Engine:
    network = Network()
    for parameter in network.parameters():
        parameter.data.zero_()  # everything must come from the checkpoint
    network.shift.zero_()
    config = {"micro_batch_size": BATCH // ranks, "global_batch_size": BATCH, "zero_stage": stage, "clip_grad": 1.0}
    config |= {} if dtype == "fp32" else {dtype: True}
    optimizer = torch.optim.AdamW(groups(network), betas=BETAS)
    return megatron_core.initialize(network, config, optimizer, lr_scheduler=lambda given: Warmup(given)).engine


def continued(folder: Path, dtype: str, stage: int, ranks: int, saved: Path | None = None) -> list[float]:
    """Losses of the next steps."""
    engine = engine_of(dtype, ranks, stage)
    assert engine.load_checkpoint(folder) == {"epoch": 7, "names": ["a", "b"]}
    assert (engine.state.iteration, engine.state.consumed_samples) == (STEPS_BEFORE, BATCH * STEPS_BEFORE)
    if saved is not None:
        engine.save_checkpoint(saved)
        engine = engine_of(dtype, ranks, stage)
        engine.load_checkpoint(saved)
    found = []
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        inputs, targets = batch(step, engine.groups.rank, ranks)
        engine.backward(engine(inputs, targets))
        report = engine.step()
        assert report is not None
        found.append(report.loss)
    return found


def expected_of(folder: Path) -> list[float]:
    losses: list[float] = json.loads((folder / "expected.json").read_text())["losses"]
    return losses[STEPS_BEFORE:]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "ranks", "stage"), CASES)
def test_the_next_losses_are_deepspeeds(name: str, ranks: int, stage: int) -> None:
    dtype = name.split("_")[1]
    wanted = expected_of(CHECKPOINTS / name.removesuffix("_universal"))
    for losses in run_ranks(ranks, continued, CHECKPOINTS / name, dtype, stage, ranks):
        assert losses == pytest.approx(wanted, rel=TOLERANCE[dtype])


def test_a_pipeline_continues_in_one_process() -> None:
    nn = torch.nn
    network = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 5))
    network[4].weight = network[0].weight
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02, betas=BETAS)
    config = {"micro_batch_size": BATCH, "global_batch_size": BATCH, "clip_grad": 0.0}
    engine = megatron_core.initialize(network, config, optimizer).engine
    engine.load_checkpoint(CHECKPOINTS / "pipeline")
    losses = []
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        generator = torch.Generator().manual_seed(100 + step)
        inputs, targets = (torch.randn(BATCH, 5, generator=generator) for _ in range(2))
        loss = nn.functional.mse_loss(engine(inputs), targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses == pytest.approx(expected_of(CHECKPOINTS / "pipeline"), rel=TOLERANCE["fp32"])


def test_tensor_parallel_parts_continue_in_one_process() -> None:
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, betas=BETAS)
    config = {"micro_batch_size": 2, "global_batch_size": 2, "clip_grad": 0.0}
    engine = megatron_core.initialize(network, config, optimizer).engine
    engine.load_checkpoint(CHECKPOINTS / "autotp")
    losses = []
    for _ in range(STEPS_AFTER):
        loss = engine(input_ids=tokens(), labels=tokens()).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses == pytest.approx(expected_of(CHECKPOINTS / "autotp"), rel=2e-6)  # sums over ranks round otherwise


def test_a_saved_copy_continues_the_same(tmp_path: Path) -> None:
    wanted = expected_of(CHECKPOINTS / "stage2_fp32")
    losses = run_ranks(2, continued, CHECKPOINTS / "stage2_fp32", "fp32", 2, 2, tmp_path / "saved")[0]
    assert losses == pytest.approx(wanted, rel=TOLERANCE["fp32"])


def test_weights_alone() -> None:
    engine = engine_of("fp32", 1, 0)
    engine.load_checkpoint(CHECKPOINTS / "stage3_fp32", load_optimizer=False)
    wanted = read_deepspeed_checkpoint(CHECKPOINTS / "stage3_fp32").weights()
    found = engine.full_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert found["shift"].abs().min() > 0
    engine.backward(engine(*batch(STEPS_BEFORE, 0, 1)))
    engine.step()
    with pytest.raises(AssertionError):  # without Adam's state the second loss differs
        second = engine(*batch(STEPS_BEFORE + 1, 0, 1)).item()
        assert second == pytest.approx(expected_of(CHECKPOINTS / "stage3_fp32")[1], rel=1e-3)


def test_another_model_and_another_optimizer_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"1 missing \(0.weight\); 9 unexpected"):
        other = torch.nn.Sequential(torch.nn.Linear(3, 7, bias=False))
        megatron_core.initialize(other, {"global_batch_size": 1}).engine.load_checkpoint(CHECKPOINTS / "stage1_fp32")
    network = Network()
    network.last = torch.nn.Linear(7, 2)
    with pytest.raises(CheckpointError, match=r"2 of another shape \(last.weight, last.bias\)"):
        megatron_core.initialize(network, {"global_batch_size": 1}).engine.load_checkpoint(CHECKPOINTS / "stage1_fp32")
    network = Network()
    engine = megatron_core.initialize(network, {"global_batch_size": 1, "optimizer": "sgd"}).engine
    with pytest.raises(CheckpointError, match=r"no state of --optimizer sgd .momentum_buffer., but exp_avg"):
        engine.load_checkpoint(CHECKPOINTS / "stage1_fp32")


def test_a_fault_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "stage3_fp32", tmp_path / "stage3")
    path = tmp_path / "stage3" / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = path.read_bytes()
    path.write_bytes(data[:1000] + b"!!!" + data[1003:])
    with pytest.raises(RankFailure, match=r"damaged|cannot be read"):
        run_ranks(2, continued, tmp_path / "stage3", "fp32", 3, 2)


@pytest.mark.whole_matrix
@pytest.mark.skipif(not (REFERENCE / "deepspeed").exists(), reason="needs DeepSpeed")
def test_deepspeed_itself_writes_such_checkpoints(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REFERENCE), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(FOLDER / "make_checkpoints.py"), str(tmp_path), "stage3_fp32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = run_ranks(2, continued, tmp_path / "stage3_fp32", "fp32", 2, 2)[0]
    assert losses == pytest.approx(expected_of(tmp_path / "stage3_fp32"), rel=TOLERANCE["fp32"])
