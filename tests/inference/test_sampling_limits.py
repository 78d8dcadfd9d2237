"""Sampling at the limits of its settings."""

import pytest
import torch

from megatron_core.errors import ConfigError
from megatron_core.inference.sampling import Sampling, choose


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-45, 5e-324])
def test_tiny_temperatures_take_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    assert choose(logits, [Sampling(temperature=temperature)], [torch.Generator().manual_seed(1)]) == [1]


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_temperatures_that_are_no_finite_numbers_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"temperature={temperature} is not a finite number >= 0"):
        Sampling(temperature=temperature)
