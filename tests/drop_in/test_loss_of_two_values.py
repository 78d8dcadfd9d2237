"""Without --calculate-per-token-loss, as in Megatron-LM, gradients are means over data-parallel ranks."""

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import pretrain, training
from megatron.training.arguments import parse_args
from megatron.training.training import train_step
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.test_program import COMMON, datasets, forward_step, model_provider

FLAG = "--calculate-per-token-loss"


def with_mean(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """A step whose loss function returns the mean over the micro-batch and a report, without a number of tokens."""
    output, sums = forward_step(data_iterator, model)

    def mean(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total, tokens, report = sums(output)
        return total / tokens.clamp(min=1), report

    return output, mean


def norms() -> list[float]:
    """The norm of the gradients of every step."""
    taken = []

    def step(*given: Any, **named: Any) -> Any:
        result = train_step(*given, **named)
        taken.append(result[5])
        return result

    training.train_step = step  # type: ignore[assignment]
    sys.argv = COMMON.replace(FLAG, "").split()
    mpu.destroy_model_parallel()
    with redirect_stdout(StringIO()):
        pretrain(datasets, model_provider, ModelType.encoder_or_decoder, with_mean)
    return taken


def test_gradients_of_means_are_averaged_over_ranks() -> None:
    expected = run_ranks(1, norms)[0]
    for taken in run_ranks(2, norms):
        np.testing.assert_allclose(taken, expected, rtol=0, atol=1e-9)


def test_the_default_yields_to_flags_and_to_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = tmp_path / "run.yaml"
    chosen.write_text("calculate_per_token_loss: true\n")
    plain = COMMON.replace(FLAG, "")
    for words, expected in {plain: False, COMMON: True, f"{plain} --config {chosen}": True}.items():
        monkeypatch.setattr(sys, "argv", words.split())
        assert parse_args().calculate_per_token_loss is expected, words
