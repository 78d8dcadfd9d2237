"""The two outputs of a model agree: its losses are the cross entropy of its logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

VOCABULARY = 61


def _outputs(settings: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, logits, and the gradient of this rank's rows of the output matrix."""
    run = tiny_run(fp64=True, init_method_std=0.3, num_layers=1, **settings)
    model = run.stages[0].eval()
    batch = run.train_loader.step(0, 1)[0]
    losses = model(batch["tokens"], labels=batch["labels"])
    losses.sum().backward()
    with torch.no_grad():
        logits = model(batch["tokens"])
    assert logits.shape[-1] == VOCABULARY, "no logits of padding"
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    np.testing.assert_allclose(losses.detach().flatten().numpy(), expected.numpy(), rtol=1e-12)
    weight = model.embedding.word_embeddings.weight if model.output_layer.weight is None else model.output_layer.weight
    return losses.detach().numpy(), logits.numpy(), weight.main_grad.numpy()


@pytest.mark.parametrize("impl", ["native", "linear"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_losses_are_the_cross_entropy_of_the_gathered_logits(tied: bool, impl: str) -> None:  # C20 C21
    """Logits are whole, losses are computed from parts; wrong gradients would reveal a confusion of both."""
    settings = {"untie_embeddings_and_output_weights": not tied}
    (baseline,) = run_ranks(1, _outputs, settings)
    settings |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": impl}
    for layout in ({"sequence_parallel": True}, {}):
        results = run_ranks(4, _outputs, settings | layout | {"tensor_model_parallel_size": 4})
        for found in results:
            for ours, expected in zip(found[:2], baseline[:2], strict=True):
                np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-12)
        rows = np.concatenate([gradient for *_, gradient in results])
        np.testing.assert_allclose(rows[:VOCABULARY], baseline[2][:VOCABULARY], rtol=1e-9, atol=1e-11)
        assert not rows[VOCABULARY:].any(), "gradient of padding"
