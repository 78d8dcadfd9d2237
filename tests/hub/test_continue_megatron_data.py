"""A training of Megatron Core on token files continues with its next samples and its losses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.megatron_peer import MEGATRON
from megatron_core.hub.megatron_lm.format import megatron_config
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import start, train
from tests.features.megatron_order.corpus import samples_of_megatron, settings_in, write_files
from tests.hub import megatron_training as theirs

BEFORE, AFTER = 3, 10
ITERATIONS, EVALUATED = 20, 2
WANTED = (ITERATIONS * theirs.BATCH, EVALUATED * theirs.BATCH, EVALUATED * theirs.BATCH)
"""Samples of training, validation and test; there is one evaluation, at the end."""


@dataclass(frozen=True)
class Case:
    """A training of Megatron Core on the files of ``flags``, and our layout that continues it."""

    flags: str
    shape: dict[str, Any]
    ranks: int
    layout: str
    how: str
    """``--ckpt-format torch``, or how ``torch_dist`` stores the optimizer's state."""
    ours: dict[str, Any]
    name: str = ""


RESET = {"reset_position_ids": True, "reset_attention_mask": True}
EOD = {"eod_mask_loss": True}
LATER = theirs.AHEAD_OF_EXPERTS | {"mtp_num_layers": 2, "moe_router_load_balancing_type": "aux_loss"}
GLOBAL = theirs.EXPERTS | {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
CASES = (
    Case("one file, epochs", theirs.GPT, 1, "", "torch", {}),
    Case("weights", theirs.LLAMA, 2, "", "dp_reshardable", {"tensor_model_parallel_size": 2}),
    Case("by size", theirs.EXPERTS, 2, "ep2", "fully_reshardable", {"pipeline_model_parallel_size": 2}),
    Case("own files", theirs.EXPERTS, 2, "ep2", "torch", {"expert_model_parallel_size": 2}),
    Case("one file, epochs", theirs.GPT | RESET | EOD, 1, "", "torch", {"tensor_model_parallel_size": 2}, "documents"),
    Case("weights", theirs.LLAMA | RESET | EOD, 1, "", "torch", {"pipeline_model_parallel_size": 2}, "documents, rope"),
    Case("one file, epochs", theirs.EXPERTS | EOD, 1, "", "torch", {"expert_model_parallel_size": 2}, "eod, experts"),
    Case("one file, epochs", GLOBAL | {"moe_z_loss_coeff": 0.1}, 1, "", "torch", {}, "experts, losses per token"),
    Case("weights", LATER | {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}, 1, "", "torch", {}, "experts, mtp"),
)


def _write(folder: Path, case: Case) -> None:
    """Train on the files, save, and record the next losses."""
    samples, *_ = samples_of_megatron(settings_in(folder, case.flags), WANTED)

    def data(iteration: int) -> Tensor:
        batch = [samples[number] for number in range((iteration - 1) * theirs.BATCH, iteration * theirs.BATCH)]
        return torch.stack([torch.cat([sample["tokens"], sample["labels"][-1:]]) for sample in batch])

    training = theirs.Training(case.shape, case.layout, data=data, distributed=case.ranks > 1)
    for _ in range(BEFORE):
        training.step()
    if case.how == "torch":
        training.save_rank_files(folder / "saved")
    else:
        training.save(folder / "saved", case.how)
    losses = [training.step() for _ in range(AFTER)]
    (folder / "losses.json").write_text(json.dumps(losses))


def continued(settings: dict[str, Any]) -> list[float]:
    """The losses of the steps after the checkpoint."""
    run = start(settings)
    assert (run.state.iteration, run.state.consumed_samples) == (BEFORE, BEFORE * theirs.BATCH)
    return [loss for loss, _ in train(run, AFTER)]


@pytest.mark.drawn(2)
@pytest.mark.skipif(not MEGATRON.is_dir(), reason="megatron-core is not installed (make install-test)")
@pytest.mark.parametrize("case", CASES, ids=[case.name or case.flags for case in CASES])
def test_losses_are_those_of_megatron_on_the_same_files(case: Case, tmp_path: Path) -> None:
    write_files(tmp_path)
    theirs.ranks_of_megatron(theirs.load_megatron, {case.ranks: (_write, tmp_path, case)})
    settings = megatron_config(tmp_path / "saved" / f"iter_{BEFORE:07d}").flat() | case.ours
    settings |= settings_in(tmp_path, case.flags)
    settings |= {name: case.shape.get(name, False) for name in theirs.DOCUMENTS}
    settings |= {"tokenizer_type": "NullTokenizer", "calculate_per_token_loss": False}
    settings |= {"mock_data": False, "eval_iters": EVALUATED, "load": str(tmp_path / "saved")}
    assert settings["data_order"] == "megatron"
    losses = run_ranks(2 if case.ours else 1, continued, settings)[0]
    expected = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(expected, abs=5e-5)
    assert len({round(loss, 3) for loss in expected}) > AFTER // 2, "the losses do not change"
