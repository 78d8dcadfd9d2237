"""Sampling at the limits of its settings."""

import pytest
import torch

from megatron_core.errors import ConfigError
from megatron_core.inference.sampling import Sampling, fault_of, sample_tokens


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-45, 5e-324])
def test_tiny_temperatures_take_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    assert sample_tokens(logits, [Sampling(temperature=temperature)], [torch.Generator().manual_seed(1)]) == [1]


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_temperatures_that_are_no_finite_numbers_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"temperature={temperature} is not a finite number >= 0"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2)])
@pytest.mark.parametrize("wrong", [[float("nan")], [float("inf"), 0.0], [float("-inf")] * 3, [0.0, float("nan"), 1.0]])
def test_logits_that_are_not_finite_are_an_error(wrong: list[float], sampling: Sampling) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], (wrong * 3)[:3]])
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    first, second = sample_tokens(logits, [sampling] * 2, generators)
    largest = wrong[1] if len(wrong) == 3 and wrong[0] == 0.0 else wrong[0]
    assert first == 1 or sampling.temperature, "the other row is chosen as usual"
    assert second < 0 and f"the largest logit of the next token is {largest}, so no token" in fault_of(second)
    excluded = torch.tensor([[float("-inf"), 3.0, float("-inf")]])
    assert sample_tokens(excluded, [sampling], generators[:1]) == [1], "tokens may be excluded"
