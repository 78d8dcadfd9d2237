"""With ``fp32_residual_connection`` the residual stream of a model in 16 bits is float32."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_core.config import ModelConfig
from megatron_core.inference import Request, Sampling, generate
from megatron_core.inference.generator import Generator
from megatron_core.models import GPTModel
from megatron_core.ops.reference import bias_dropout_add
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.tensor_parallel import KeyedDropout, ModelParallelConfig
from megatron_core.transformer.block import TransformerLayer
from megatron_core.transformer.context import SequenceContext
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "init_method_std": 0.2}
RMS = {"normalization": "RMSNorm", "disable_bias_linear": True}
SHARED = {"parallel_residual": True, "parallel_residual_shared_norm": True}
KINDS = {
    "GPT": {"hidden_dropout": 0.0},
    "dropout": {"hidden_dropout": 0.3},
    "RMSNorm": RMS | {"hidden_dropout": 0.0},
    "norms minus one": RMS | {"apply_layernorm_1p": True, "hidden_dropout": 0.0},
    "no weights": RMS | {"disable_weight_layernorm": True, "hidden_dropout": 0.0},
    "sandwich": {"norm_placement": "sandwich", "hidden_dropout": 0.0},
    "post": {"norm_placement": "post", "hidden_dropout": 0.0},
    "two paths": {"parallel_residual": True, "hidden_dropout": 0.0},
    "shared norm": SHARED | {"hidden_dropout": 0.1},
    "multiplier": {"residual_multiplier": 0.3, "hidden_dropout": 0.0},
}


def model_of(dtype: torch.dtype = torch.bfloat16, *, wide: bool = True, **settings: object) -> GPTModel:
    config = ModelConfig(
        **(SIZES | {"attention_dropout": 0.0, "kernel_backend": "reference"} | settings), fp32_residual_connection=wide
    )
    model = GPTModel(config, 61, 16, parallel=ModelParallelConfig(params_dtype=dtype))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype), alpha=0.1)
    return model


def plain_norm(norm: torch.nn.Module, x: Tensor) -> Tensor:
    """The norm of x in float32, in the dtype of the weights."""
    if not hasattr(norm, "size"):  # no norm
        return x.bfloat16()
    weight = getattr(norm, "weight", None)
    if weight is None:
        return functional.rms_norm(x.float(), (norm.size,), eps=norm.epsilon).bfloat16()
    factor = weight.float() + float(norm.weight_minus_one)
    if norm.bias is None:
        return functional.rms_norm(x.float(), (norm.size,), factor, norm.epsilon).bfloat16()
    return functional.layer_norm(x.float(), (norm.size,), factor, norm.bias.float(), norm.epsilon).bfloat16()


def plain_layer(layer: TransformerLayer, stream: Tensor, context: SequenceContext) -> Tensor:
    """The layer by its formula; attention, MLP and norms of their outputs are the layer's own."""

    def added(
        to: Tensor, output: Tensor, bias: Tensor | None, after: torch.nn.Module | None, dropout: KeyedDropout
    ) -> Tensor:
        if after is not None:
            output, bias = after(output if bias is None else output + bias), None
        total = factor * output.float()
        if bias is not None:
            total = total + factor * bias.float()
        if dropout.p == 0.0:
            return to + total
        return to + bias_dropout_add(total, None, None, dropout.p, dropout.key, context.sample_index, None, None, 0)

    factor = layer.residual_multiplier
    normed = plain_norm(layer.input_layernorm, stream)
    attended = added(
        stream,
        *layer.self_attention(normed, context),
        layer.post_self_attn_layernorm,
        layer.attention_dropout,
    )
    if not layer.shares_norm:
        normed = plain_norm(layer.pre_mlp_layernorm, stream if layer.parallel_residual else attended)
    return added(attended, *layer.mlp(normed, context), layer.post_mlp_layernorm, layer.mlp_dropout)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_layer_is_its_formula_with_a_float32_stream(kind: dict) -> None:
    """Output, gradient of the input and gradients of the weights to the bit."""
    layer = model_of(**kind).decoder.layers[0]
    context = SequenceContext(sample_index=torch.tensor([3, 8]))
    found = []
    for compute in (layer, lambda x, context: plain_layer(layer, x, context)):
        torch.manual_seed(2)
        stream = (3 * torch.randn(8, 2, 32)).requires_grad_()
        output = compute(stream, context)
        assert output.dtype == torch.float32
        gradients = torch.autograd.grad(output, [stream, *layer.parameters()], torch.randn(8, 2, 32))
        assert gradients[0].dtype == torch.float32 and gradients[-1].dtype == torch.bfloat16
        found.append([output, *gradients])
    for mine, formula in zip(*found, strict=True):
        assert torch.equal(mine, formula)


def test_the_native_kernels_agree() -> None:
    context = SequenceContext(sample_index=torch.tensor([3, 8]))
    stream = torch.randn(8, 2, 32)
    reference, auto = (
        model_of(hidden_dropout=0.3, kernel_backend=backend).decoder.layers[0](stream, context)
        for backend in ("reference", "auto")
    )
    torch.testing.assert_close(auto, reference, rtol=1e-2, atol=5e-2)  # attention and MLP round to bf16
    assert auto.dtype == torch.float32


def test_the_rounding_of_the_stream_is_gone() -> None:
    """A deep model has a smaller distance to the same weights in float64."""
    deep = {"num_layers": 32, "hidden_dropout": 0.0, "init_method_std": 0.05} | RMS
    ids = torch.arange(32).reshape(2, 16) * 7 % 61
    narrow, wide, exact = (
        model_of(torch.bfloat16, wide=False, **deep),
        model_of(torch.bfloat16, wide=True, **deep),
        model_of(torch.float64, wide=True, **deep),
    )
    exact.load_state_dict({name: value.double() for name, value in wide.state_dict().items()})
    narrow.load_state_dict(wide.state_dict())
    with torch.no_grad():
        expected = exact(ids)
        errors = [((model(ids).double() - expected).square().mean().sqrt()).item() for model in (narrow, wide)]
    assert expected.dtype == torch.float64
    assert errors[1] < 0.6 * errors[0], errors


def test_every_layer_receives_float32() -> None:
    """The output layer receives the dtype of the weights."""
    model = model_of(hidden_dropout=0.1)
    seen: list[torch.dtype] = []
    for module in (*model.decoder.layers, model.decoder.final_layernorm, model.output_layer):
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    model(torch.arange(32).reshape(2, 16), sequences=SequenceDetails(sample_index=torch.arange(2)))
    assert seen == [torch.float32] * 3 + [torch.bfloat16]


def _generated(settings: dict) -> list[int]:
    run = tiny_run(**settings, num_layers=4, init_method_std=0.3, bf16=True, fp32_residual_connection=True)
    for stage in run.stages.values():
        stage.eval()
    generator = Generator(run.config, run.groups, run.stages, len(run.layers), run.vocab_size, run.world.device)
    request = Request(prompt=(5, 11, 17, 23), max_new_tokens=6, sampling=Sampling())
    return list(generate(generator, request))


def test_generation_in_a_pipeline() -> None:
    """Ranks send the stream in float32; tokens are those of one process."""
    alone = _generated({})
    assert len(alone) == 6 and any(a != b for a, b in pairwise(alone))
    assert run_ranks(2, _generated, {"pipeline_model_parallel_size": 2}) == [alone] * 2
