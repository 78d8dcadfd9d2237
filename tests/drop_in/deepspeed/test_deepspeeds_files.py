"""``DeepSpeedEngine.load_checkpoint`` of files that DeepSpeed itself wrote."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.test_deepspeed_checkpoints import BETAS, CHECKPOINTS, TOLERANCE, expected_of
from tests.hub.deepspeed.network import BATCH, STEPS_AFTER, STEPS_BEFORE, Network, batch, groups


def engine_of(ranks: int, stage: int, dtype: str) -> Any:
    network = Network()
    for parameter in network.parameters():
        parameter.data.zero_()
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 0.01], "warmup_num_steps": 5}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    optimizer = torch.optim.AdamW(groups(network), lr=0.02, betas=BETAS)
    return deepspeed.initialize(model=network, optimizer=optimizer, config=config)[0]


def continued(folder: Path, ranks: int, stage: int, dtype: str) -> list[float]:
    engine = engine_of(ranks, stage, dtype)
    path, state = engine.load_checkpoint(str(folder))
    assert (path, state) == (str(folder / "step3"), {"epoch": 7, "names": ["a", "b"]})
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 12, 0)
    found = []
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        inputs, targets = batch(step, torch.distributed.get_rank() if ranks > 1 else 0, ranks)
        loss = engine(inputs.half() if dtype == "fp16" else inputs, targets)
        total = loss.detach().float().clone()
        if ranks > 1:
            torch.distributed.all_reduce(total)
        found.append(float(total) / ranks)
        engine.backward(loss)
        engine.step()
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "stage"), [("stage1_fp32", 2, 2), ("stage3_fp32_universal", 2, 3), ("stage2_fp16", 1, 0)]
)
def test_the_next_losses_are_deepspeeds(name: str, ranks: int, stage: int) -> None:
    dtype = name.split("_")[1]
    wanted = expected_of(CHECKPOINTS / name.removesuffix("_universal"))
    for losses in run_ranks(ranks, continued, CHECKPOINTS / name, ranks, stage, dtype, backend="gloo"):
        assert losses == pytest.approx(wanted, rel=TOLERANCE[dtype])


def weights_only(folder: Path) -> dict[str, Any]:
    engine = engine_of(1, 0, "fp32")
    engine.load_checkpoint(str(folder), "step3", load_module_only=True)
    return {"steps": engine.global_steps, "weight": engine.module.first.weight.detach().numpy().copy()}


def test_weights_alone_and_a_damaged_file(tmp_path: Path) -> None:
    (found,) = run_ranks(1, weights_only, CHECKPOINTS / "stage2_fp32")
    saved = torch.load(CHECKPOINTS / "stage2_fp32" / "step3" / "mp_rank_00_model_states.pt")
    assert found["steps"] == 0 and (found["weight"] == saved["module"]["first.weight"].numpy()).all()
    shutil.copytree(CHECKPOINTS / "stage2_fp32", tmp_path / "run")
    (tmp_path / "run" / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(RankFailure, match="run with 2 ranks, but there are files of 1"):
        run_ranks(1, weights_only, tmp_path / "run")
