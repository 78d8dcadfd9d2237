"""The note that GELU differs from Megatron-LM's default."""

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.pretrain import notes
from megatron_core.training.setup import set_up

TOLD = "GELU is exact; Megatron-LM"


@pytest.mark.parametrize(
    ("settings", "loaded", "told"),
    [
        ({}, False, 1),
        ({}, True, 0),
        ({"openai_gelu": True}, False, 0),
        ({"disable_bias_linear": True}, False, 0),
        ({"swiglu": True}, False, 0),
        ({"squared_relu": True}, False, 0),
    ],
)
def test_exact_gelu_is_noted(settings: dict[str, bool], loaded: bool, told: int) -> None:
    config = RunConfig.from_flat(
        RunConfig().flat() | {"mock_data": True, "train_iters": 1, "vocab_size": 64} | settings
    )
    run = set_up(config, World(0, 1, 0, torch.device("cpu")))
    run.loaded = loaded
    assert sum(note.startswith(TOLD) for note in notes(run)) == told
