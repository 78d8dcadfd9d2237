"""A program of Megatron-LM continues the checkpoints of Megatron-LM itself, in another layout, with its losses."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.drop_in.test_pretrain_gpt import model_provider, steps
from tests.drop_in.test_program import forward_step
from tests.hub.megatron_0_20.make_files import COMMON
from tests.hub.test_real_megatron_checkpoints import LLAMA as MODEL
from tests.hub.test_real_megatron_checkpoints import steps as recorded
from tests.hub.test_real_megatron_checkpoints import unpack

FLAGS = [flag for flag in COMMON if flag not in ("--eval-interval", "1000", "--save-interval", "3")]
LLAMA = (*MODEL, "--ffn-hidden-size", "24")
FLAGS += ["--lr-one-step-later", "--data-order", "megatron"]
CASES = {
    "gpt": ("--pipeline-model-parallel-size", "2"),
    "llama_tp2_dp_reshardable": (*LLAMA, "--pipeline-model-parallel-size", "2"),
    "llama_pp2": (*LLAMA, "--tensor-model-parallel-size", "2"),
    "llama_tp2_rank_files": (*LLAMA, "--use-distributed-optimizer"),
}


class Recorded(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The tokens used by Megatron-LM from iteration 4 on, four sequences each."""

    def __init__(self, name: str) -> None:
        self.rows = [row for step in recorded(name) for row in step["tokens"]]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = torch.tensor(self.rows[number - 12])
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(16), "position_ids": torch.arange(16)}


def job(folder: str, name: str, more: tuple[str, ...]) -> str:
    """The output of the program, which continues from ``folder``."""
    sys.argv, out = ["program.py", *FLAGS, *more, "--load", folder], StringIO()
    mpu.destroy_model_parallel()

    def datasets(sizes: tuple[int, int, int]) -> list[Recorded | None]:
        return [Recorded(name) if mpu.get_tensor_model_parallel_rank() == 0 else None, None, None]

    with redirect_stdout(out):
        pretrain(datasets, model_provider, ModelType.encoder_or_decoder, forward_step)
    return out.getvalue()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_megatron(name: str, tmp_path: Path) -> None:
    texts = run_ranks(2, job, str(unpack(name, tmp_path)), name, CASES[name])
    losses = next(filter(len, map(steps, texts)))[:, 0]
    assert losses == pytest.approx([step["loss"] for step in recorded(name)], abs=2e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--openai-gelu",), "openai_gelu=True, but the checkpoint was trained with openai_gelu=False"),
        (("--ffn-hidden-size", "32"), r"linear_fc1.bias has the shape \[64\], its arguments ask for \[32\]"),
        (("--optimizer", "sgd"), "has no state of this optimizer"),
    ],
)
def test_another_model_or_optimizer_is_refused(more: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=message):
        run_ranks(1, job, str(unpack("gpt", tmp_path)), "gpt", more)
