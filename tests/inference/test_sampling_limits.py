"""Sampling at the limits of its settings."""

import pytest
import torch

from megatron_core.inference.sampling import Sampling, choose


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-45, 5e-324])
def test_tiny_temperatures_take_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    assert choose(logits, [Sampling(temperature=temperature)], [torch.Generator().manual_seed(1)]) == [1]
