"""Factors on embeddings, layers and logits do what multiplied weights do, with biases, in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_core.config import ModelConfig
from megatron_core.models import GPTModel
from megatron_core.tensor_parallel import ModelParallelConfig

FACTOR = 0.3
SCALED = {
    "embedding_multiplier": ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"),
    "residual_multiplier": ("linear_proj.weight", "linear_proj.bias", "linear_fc2.weight", "linear_fc2.bias"),
    "logit_multiplier": ("output_layer.weight",),
}


def model(**settings: float) -> GPTModel:
    config = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        init_method_std=0.2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        untie_embeddings_and_output_weights=True,
        **settings,
    )
    found = GPTModel(config, 13, 8, parallel=ModelParallelConfig(params_dtype=torch.float64))
    torch.manual_seed(1)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


@pytest.mark.parametrize("setting", SCALED)
def test_a_factor_does_what_multiplied_weights_do(setting: str) -> None:
    ids = torch.arange(16).reshape(2, 8) % 13
    factored, multiplied = model(**{setting: FACTOR}), model()
    unchanged = multiplied(ids)
    with torch.no_grad():
        for name, parameter in multiplied.named_parameters():
            if name.endswith(SCALED[setting]):
                parameter.mul_(FACTOR)
    torch.testing.assert_close(factored(ids), multiplied(ids), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(factored(ids), unchanged)
