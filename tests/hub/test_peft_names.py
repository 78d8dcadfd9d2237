"""Names of adapters in PEFT's format."""

from __future__ import annotations

import pytest

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.lora.settings import LAYERS, NAMES
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES
from megatron_core.hub.hugging_face.peft import PeftNames, target_of
from megatron_core.hub.hugging_face.tensors import TensorSource
from tests.hub.invented_architecture import INVENTED

LAYER = "decoder.layers.0.mlp.experts.linear_fc2"


def names(model_type: str) -> PeftNames:
    """Adapters of whole matrices of a model with 2 experts."""
    model = ModelConfig(hidden_size=4, num_attention_heads=2, num_experts=2, moe_ffn_hidden_size=6)
    shapes = {f"{LAYER}.weight": (2, 4, 6)}
    return PeftNames(ARCHITECTURES[model_type], model, shapes, lambda layer, part: ((0, shapes[f"{layer}.weight"][1]),))


def test_adapters_may_have_the_names_of_every_family() -> None:
    for model_type, architecture in ARCHITECTURES.items():
        if architecture is INVENTED:  # registered by another test of this process
            continue
        for ours, stored in architecture.layer_tensors.items():
            layer = ours.removesuffix(".weight").rpartition(".")[2]
            source = TensorSource((stored,)) if isinstance(stored, str) else stored
            if layer in LAYERS and not source.stacked:
                for name in source.names:
                    named = NAMES.get(target_of(name.removesuffix(".weight")), ())
                    assert layer in [each for each, _ in named], (model_type, name)


def test_each_expert_with_its_own_tensor_has_its_own_adapter() -> None:
    places = names("qwen3_moe").places(LAYER, "")
    assert [place.module for place in places] == [f"model.layers.0.mlp.experts.{e}.down_proj" for e in range(2)]


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama4_text", "granitemoe"])
def test_experts_in_one_tensor_are_refused(model_type: str) -> None:
    with pytest.raises(CheckpointError, match=f"{model_type} stores the matrices of all experts in one tensor"):
        names(model_type).places(LAYER, "")
