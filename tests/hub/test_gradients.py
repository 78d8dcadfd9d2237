"""Gradients of every architecture are those of `transformers`, in float64.

Their gradients are saved like weights, so that the import maps them to our names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megatron_core.checkpoint import parameter_pieces
from megatron_core.hub.hugging_face import HuggingFaceReader
from megatron_core.models import GPTModel
from megatron_core.tensor_parallel import ModelParallelConfig
from tests.hub.hf_models import MODELS, RECURRENT, VOCABULARY, save_model

TOLERANCE = 1e-5
"""Their norms, rotary tables and routers are float32 in a float64 model, too."""


def loaded(folder: Path) -> GPTModel:
    """The model of a folder in float64, without dropout."""
    with HuggingFaceReader(folder) as reader:
        # With LongRoPE, transformers chooses the factors by the length of a text, and this model by its longest text.
        longest = reader.model.original_max_position_embeddings or 64
        parallel = ModelParallelConfig(params_dtype=torch.float64)
        model = GPTModel(reader.model, VOCABULARY, longest, parallel=parallel).eval()
        reader.fill(parameter_pieces(model.named_global_parameters()))
    return model


OTHERS = [name for name in MODELS if not name.startswith(RECURRENT)]
"""``test_recurrences`` compares those with a recurrence."""


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", OTHERS)
def test_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    compare_gradients(name, tmp_path, TOLERANCE)


def compare_gradients(name: str, tmp_path: Path, tolerance: float) -> None:
    """Compare logits and all gradients of one of ``MODELS``, relative to the largest of a tensor."""
    save_model(name, tmp_path / "weights")
    # Without token 0: an embedding of torch has no gradient for padding.
    ids = torch.randint(1, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "weights", dtype=torch.float64, experts_implementation="eager"
    ).eval()
    logits = theirs(input_ids=ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    ours = loaded(tmp_path / "weights")
    ours(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids[:, :-1]), logits, rtol=tolerance, atol=tolerance)
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted = dict(loaded(tmp_path / "gradients").named_global_parameters())
    errors = {
        name: ((parameter.grad - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-6)).item()
        for name, parameter in ours.named_global_parameters()
        if parameter.grad is not None
    }
    assert {name: error for name, error in errors.items() if error > tolerance} == {}
