"""Layers with a recurrence: packed documents, its memory, its state in generation, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.mixers import mixer_of
from megatron_core.errors import LayoutError
from megatron_core.features.recurrent.recurrent_layer import RecurrentLayer
from megatron_core.parallel.groups import LocalGroup
from megatron_core.planner import layer_activations
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.layer_spec import mixer_layer
from tests.runs import tiny_config

SIZES = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": (2,),
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
KIMI = {"experimental_attention_variant": "kimi_delta_attention", "linear_num_key_heads": 8}
MAMBA = {
    "hybrid_layer_pattern": "M*",
    "mamba_state_dim": 24,
    "mamba_head_dim": 8,
    "mamba_num_groups": 4,
    "mamba_dt_max": 0.8,
}
PRODUCT = MAMBA | {"mamba_dt_max": None, "mamba_mixer": "gated_delta_product"}
SHORT = {"hybrid_layer_pattern": "C*"}
KINDS = {"gated delta net": SIZES, "kimi delta attention": SIZES | KIMI, "mamba": MAMBA, "gated delta product": PRODUCT}
KINDS["short convolution"] = SHORT


def layer_of(dtype: torch.dtype, **settings: object) -> RecurrentLayer:
    config = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **settings)
    made = mixer_layer(mixer_of(config, 0).name)
    layer = made(LayerContext(config, ModelParallelConfig(params_dtype=dtype), LocalGroup(), 1), 0)
    torch.manual_seed(5)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("width", [1, 4])
def test_documents_are_computed_alone(width: int, kind: dict) -> None:
    """Neither the state nor the convolution crosses a border, also of documents shorter than the convolution."""
    layer, lengths = layer_of(torch.float64, linear_conv_kernel_dim=width, **kind), ((2, 1, 80, 17), (100,))
    hidden = torch.randn(100, 2, 64, dtype=torch.float64)
    documents = PackedDocuments.of(lengths, 2, 100, torch.device("cpu"))
    found, _ = layer(hidden, SequenceContext(documents=documents))
    for sequence, own in enumerate(lengths):
        alone = [layer(part[:, None], SequenceContext())[0] for part in hidden[:, sequence].split(list(own))]
        torch.testing.assert_close(found[:, sequence], torch.cat(alone)[:, 0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("granularity", [None, "selective"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_are_those_kept_for_backward(dtype: str, granularity: str | None, kind: dict) -> None:
    """In addition to those of a layer with attention alone or with an MLP: norms, MLP and inputs."""
    recompute = {"recompute_granularity": granularity} if granularity else {}
    sizes = {"hidden_size": 64, "seq_length": 128, "micro_batch_size": 2, "num_layers": 2, "bf16": dtype == "bf16"}
    config = tiny_config(**sizes, **kind, **recompute)
    layer = layer_of(torch.bfloat16 if dtype == "bf16" else torch.float32, **recompute, **kind)
    weights = {parameter.data_ptr() for parameter in layer.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = torch.randn(128, 2, 64, dtype=layer.out_proj.weight.dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, SequenceContext())
    found = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights) - hidden.nbytes
    attention = config.model.num_attention_heads * 4 * config.model.head_size * hidden.element_size() * 256
    scores = 4 * config.model.num_attention_heads * 256 * (granularity is None)
    planned = layer_activations(config, 0) - layer_activations(config, 1) + attention + scores
    assert planned == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_attention_mask_is_refused(kind: dict) -> None:
    layer = layer_of(torch.float64, **kind)
    with pytest.raises(
        LayoutError, match=f"kind {layer.recurrence.name}, whose states hold all earlier tokens; give docum"
    ):
        layer(
            torch.zeros(4, 1, 64, dtype=torch.float64),
            SequenceContext(attention_mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool)),
        )


@pytest.mark.parametrize("last", ["M", "H", "C", "-"])
def test_layers_of_later_tokens_have_only_the_parts_of_their_pattern(last: str) -> None:
    """Not those of the last layer, as in Megatron Core (``M*/*-/*-``)."""
    config = RunConfig.from_flat(
        {"num_layers": 3, "hybrid_layer_pattern": f"M*{last}", "mtp_num_layers": 2, "mtp_layer_pattern": "*-"}
    )
    model = config.model
    for layer in (3, 4):
        assert mixer_of(model, layer).name == "grouped_query"
        assert (model.recurrence_of(layer), model.feed_forward_name(layer)) == (None, "mlp")
    assert model.is_recurrent(2) == (last != "-")
