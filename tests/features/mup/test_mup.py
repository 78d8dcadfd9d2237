"""Maximal update parametrisation against its formulas (Yang et al. 2022, table 8): weights, logits, updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.hugging_face import architecture_for
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from tests.runs import tiny_run

PLAIN = {"fp64": True, "untie_embeddings_and_output_weights": True, "clip_grad": 0.0, "weight_decay": 0.0}
MUP = PLAIN | {"use_mup": True, "mup_base_hidden_size": 8, "mup_base_head_dim": 4.0}  # width 32: four times the base
HIDDEN = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


def weights(run: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.stages[0].named_parameters()}


def test_initial_weights() -> None:
    mup, plain = weights(tiny_run(**MUP)), weights(tiny_run(**PLAIN))
    for name, weight in mup.items():
        factor = 0.5 if name.endswith(HIDDEN) else 1.0
        torch.testing.assert_close(weight, factor * plain[name], rtol=1e-6, atol=0, msg=name)


def test_logits() -> None:
    """The same weights in a plain model with attention scale and factors inserted by hand."""
    mup, plain = tiny_run(**MUP | {"mup_embedding_mult": 3.0}), tiny_run(**PLAIN, softmax_scale=4.0**0.5 / 8)
    ours, theirs = mup.stages[0], plain.stages[0]
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for parameter in theirs.embedding.parameters():
            parameter.mul_(3.0)
        tokens = torch.arange(32).view(2, 16)
        torch.testing.assert_close(ours(tokens), theirs(tokens) / 4, rtol=1e-10, atol=1e-12)
        chosen = tiny_run(**MUP | {"mup_embedding_mult": 3.0, "mup_output_mult": 0.5}).stages[0]
        chosen.load_state_dict(ours.state_dict())
        torch.testing.assert_close(chosen(tokens), theirs(tokens) / 2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "hidden", "embedding", "vector"),
    [
        ({}, 0.25, 1.0, 1.0),
        ({"decoupled_lr": 2e-2}, 0.25, 2.0, 1.0),
        ({"optimizer": "lion"}, 0.25, 1.0, 1.0),
        ({"optimizer": "sgd"}, 1.0, 4.0, 4.0),
        ({"optimizer": "sgd", "decoupled_lr": 2e-2}, 1.0, 2.0, 4.0),
        ({"optimizer": "muon"}, 1.0, 1.0, 1.0),
    ],
    ids=["adam", "adam, decoupled", "lion", "sgd", "sgd, decoupled", "muon"],
)
def test_learning_rates(settings: dict, hidden: float, embedding: float, vector: float) -> None:
    """The ratio of the first update of each kind to that of the same model with the learning rate of its base."""
    settings = MUP | {"adam_eps": 1e-20} | settings  # so that every gradient is far above epsilon
    run, base = tiny_run(**settings), tiny_run(**settings | {"decoupled_lr": None})
    base.optimizer.width = 1.0
    start = weights(run)
    for each in (run, base):
        train_step(each)
    found, expected = weights(run), weights(base)
    for name, first in start.items():
        outside = name.startswith(("embedding", "output_layer"))
        factor = embedding if outside else hidden if name.endswith(HIDDEN) else vector
        moved = factor * (expected[name] - first)
        torch.testing.assert_close(found[name] - first, moved, rtol=1e-6, atol=1e-15, msg=name)


def test_epsilon_of_hidden_matrices() -> None:
    """With gradients far below epsilon an update is lr g / eps: both are divided, so it equals the base's."""
    run, base = (tiny_run(**MUP, adam_eps=1e3) for _ in range(2))
    base.optimizer.width = 1.0
    start = weights(run)
    for each in (run, base):
        train_step(each)
    for name, weight in weights(run).items():
        moved = weights(base)[name] - start[name]
        torch.testing.assert_close(weight - start[name], moved, rtol=1e-3, atol=1e-15, msg=name)


def test_other_projects_have_no_such_models() -> None:
    """Llama has all of these modern settings except the listed ones."""
    modern = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
    }
    modern |= {"untie_embeddings_and_output_weights": True}
    assert architecture_for(ModelConfig(**modern)).model_type == "llama"
    with pytest.raises(CheckpointError, match=r"nearest is llama, except for .*use_mup=True, there False"):
        architecture_for(ModelConfig(**modern, use_mup=True, mup_base_hidden_size=16))
