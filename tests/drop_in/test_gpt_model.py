"""``GPTModel`` with Megatron Core's arguments."""

from __future__ import annotations

import copy
import gc
from argparse import Namespace
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import linear_with_frozen_weight
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.transformer.utils import (
    attention_mask_func,
    get_default_causal_mask,
    get_sliding_window_causal_mask,
    openai_gelu,
)
from megatron.core.utils import check_param_hashes_across_dp_replicas
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.utils import calc_params_l2_norm
from megatron_core import parallel_state
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.megatron_flags.tables import ACCEPTED
from megatron_core.models.gpt import model as own
from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_core.verify.ranks import run_ranks

VOCABULARY, LENGTH = 48, 12
IDS = (torch.arange(2 * LENGTH).view(2, LENGTH) * 7) % VOCABULARY
MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]


def config(kind: type[TransformerConfig] = TransformerConfig, **settings: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
    return kind(**sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | settings)


def gpt(settings: TransformerConfig | None = None, spec: Any = None, **given: Any) -> GPTModel:
    model_parallel_cuda_manual_seed(7)
    return GPTModel(settings or config(), spec or get_gpt_layer_local_spec(), VOCABULARY, LENGTH, **given)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_it_is_the_same_model_as_this_packages(tied: bool, positions: str) -> None:
    settings = config(
        num_query_groups=2, normalization="RMSNorm", gated_linear_unit=True, activation_func=nn.functional.silu
    )
    model = gpt(settings, position_embedding_type=positions, share_embeddings_and_output_weights=tied)
    theirs = settings.model_config(
        position_embedding_type=positions,
        untie_embeddings_and_output_weights=not tied,
        make_vocab_size_divisible_by=1,
    )
    assert theirs.swiglu
    assert theirs.query_groups == 2
    twin = own.GPTModel(theirs, VOCABULARY, LENGTH, parallel=settings.parallel_options(), seed=7)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert torch.equal(model(IDS, labels=IDS), twin(IDS, labels=IDS))
    assert torch.equal(model(IDS), twin(IDS))


def test_logits_in_float32() -> None:
    model = gpt(config(params_dtype=torch.bfloat16, bf16=True), logit_dtype=torch.float32)
    assert model(IDS).dtype == torch.float32
    assert gpt(config(params_dtype=torch.bfloat16, bf16=True))(IDS).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="logit_dtype is not supported"):
        gpt(logit_dtype=torch.bfloat16)


def test_a_causal_mask_is_what_no_mask_says() -> None:
    model = gpt(config(fp8=False))  # the same as None
    torch.testing.assert_close(model(IDS, None, MASK), model(IDS), rtol=0, atol=1e-12)


def test_transformer_engines_specification_gives_the_same_layer() -> None:
    expected = gpt()(IDS)
    assert torch.equal(gpt(spec=get_gpt_layer_with_transformer_engine_spec())(IDS), expected)
    assert torch.equal(gpt(spec=get_gpt_decoder_block_spec(config(), use_transformer_engine=True))(IDS), expected)


LATENT = {"kind": MLATransformerConfig, "qk_layernorm": True, "q_lora_rank": 8, "kv_lora_rank": 8}
NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "dense": (
        {"normalization": "LayerNorm"},
        "self_attention.linear_qkv.layer_norm_weight self_attention.linear_qkv.layer_norm_bias "
        "mlp.linear_fc1.layer_norm_weight mlp.linear_fc1.layer_norm_bias",
    ),
    "experts": (
        {"num_moe_experts": 4, "moe_layer_freq": [1, 0], "add_bias_linear": False, "normalization": "RMSNorm"},
        "self_attention.linear_qkv.layer_norm_weight pre_mlp_layernorm.weight",
    ),
    "latent attention": (
        LATENT | {"add_bias_linear": False, "normalization": "RMSNorm"},
        "input_layernorm.weight self_attention.linear_q_up_proj.layer_norm_weight "
        "self_attention.linear_kv_up_proj.layer_norm_weight mlp.linear_fc1.layer_norm_weight",
    ),
}
"""Settings, and the names of norms in the first layer of Megatron Core's model with Transformer Engine."""


@pytest.mark.parametrize("kind", NAMES)
def test_transformer_engines_specification_gives_its_names(kind: str) -> None:
    changes, names = NAMES[kind]
    settings, latent = config(**changes), kind == "latent attention"
    specs: Any = [
        make(None, False, latent, latent)
        for make in (get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec)
    ]
    if kind == "experts":
        specs = [get_gpt_decoder_block_spec(settings, use_transformer_engine=engine) for engine in (False, True)]
    twin, model = (gpt(settings, spec) for spec in specs)
    layer = {
        name.removeprefix("decoder.layers.0.") for name in model.state_dict() if name.startswith("decoder.layers.0")
    }
    assert {name for name in layer if "norm" in name} == set(names.split())
    # Checkpoints have the names of the other specification; state_dict is accepted with both.
    keys = [{entry.key for entry in built.sharded_state_dict().values()} for built in (twin, model)]
    assert keys[0] == keys[1]
    for parameter in twin.parameters():
        nn.init.normal_(parameter)
    model.load_state_dict(twin.state_dict())
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    gradients = {}
    for built in (twin, model, copied):
        built(IDS, labels=IDS).sum().backward()
        gradients[built] = {name: parameter.grad for name, parameter in built.named_global_parameters()}
        assert gradients[built].keys() == gradients[twin].keys()
        assert all(torch.equal(grad, gradients[twin][name]) for name, grad in gradients[built].items())


def _stages() -> list[tuple[list[str], list[str]]]:
    """The names of the weights of two chunks in ``state_dict``, and in checkpoints."""
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    parallel_state.initialize_model_parallel(**pipeline)
    settings = config(
        num_layers=8,
        pipeline_dtype=torch.float64,
        num_moe_experts=2,
        moe_grouped_gemm=True,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        **pipeline,
    )
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    parallel_state.set_virtual_pipeline_model_parallel_rank(1)  # instead of vp_stage, in older programs
    ends = {"pre_process": False, "post_process": False}
    chunks = [gpt(settings, spec, vp_stage=0, **ends), gpt(settings, spec, **ends)]
    return [
        (list(chunk.state_dict()), [entry.key for entry in chunk.sharded_state_dict().values()]) for chunk in chunks
    ]


def test_a_stage_numbers_its_layers_from_0_and_checkpoints_all_layers() -> None:
    for rank, chunks in enumerate(run_ranks(2, _stages)):
        for chunk, (names, keys) in enumerate(chunks):
            first = 4 * chunk + 2 * rank
            assert {name.split(".")[2] for name in names} == {"0", "1"}
            assert any("expert_bias" in name for name in names)
            parts = [name.split(".") for name in names]
            assert keys == [".".join([*p[:2], str(first + int(p[2])), *p[3:]]) for p in parts]


EXPERTS = {"num_moe_experts": 4, "moe_layer_freq": [0, 1], "add_bias_linear": False, "num_query_groups": 2}


def _norm(sizes: dict[str, int]) -> tuple[float, bool]:
    """The norm of all weights by Megatron's function, and whether replicas are equal by Megatron's function."""
    parallel_state.initialize_model_parallel(**sizes)
    stages = {"pipeline_model_parallel_size": sizes.get("pipeline_model_parallel_size", 1)}
    settings = config(pipeline_dtype=torch.float64, **EXPERTS | stages)
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=True)
    model = gpt(settings, spec, share_embeddings_and_output_weights=True, **ends)
    return calc_params_l2_norm(model), check_param_hashes_across_dp_replicas([model])


def test_parameters_have_megatrons_attributes_of_their_split() -> None:
    settings = config(**EXPERTS)
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=True)
    undivided = gpt(settings, spec, share_embeddings_and_output_weights=True)
    expected = sum(parameter.square().sum() for parameter in undivided.parameters()) ** 0.5
    for axis in ("tensor", "expert", "pipeline"):
        for norm, are_equal in run_ranks(2, _norm, {f"{axis}_model_parallel_size": 2}):
            assert norm == pytest.approx(expected.item(), rel=1e-12)
            assert are_equal


@pytest.mark.parametrize("name", ["{}.weight{}", "local_experts.{1}.{0}.weight"])
def test_each_expert_has_its_parameters(name: str) -> None:
    grouped = name.startswith("{}")
    settings = config(num_moe_experts=4, moe_layer_freq=[0, 1], moe_grouped_gemm=grouped)
    model = gpt(settings, get_gpt_decoder_block_spec(settings, use_transformer_engine=True))
    stacked = config(num_moe_experts=4, moe_layer_freq=[0, 1], moe_grouped_gemm=True)
    twin = gpt(stacked, get_gpt_decoder_block_spec(stacked, use_transformer_engine=False))
    stacks, inner = twin.decoder.layers[1].mlp.experts, "decoder.layers.1.mlp.experts."
    expected = {
        inner + name.replace("weight", part).format(linear, expert): stack[expert]
        for linear in ("linear_fc1", "linear_fc2")
        for part, stack in getattr(stacks, linear).named_parameters()
        for expert in range(4)
    }
    for named in (model.state_dict(), dict(model.named_parameters())):
        assert {name for name in named if name.startswith(inner)} == set(expected)
        assert all(torch.equal(named[name], value) for name, value in expected.items())
    assert len([*model.parameters()]) == len([*twin.parameters()])
    model.load_state_dict(twin.state_dict())
    twin.load_state_dict({name: value.clone() for name, value in twin.state_dict().items()})
    model.load_state_dict(model.state_dict())
    # A program's own optimizer of the named parameters trains the experts.
    rates = {"lr": 0.1, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(dict(built.named_parameters()).values(), **rates) for built in (model, twin)]
    for _ in range(2):
        losses = []
        for built, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            penalty = sum(parameter.square().sum() for _, parameter in built.named_parameters())
            loss = built(IDS, labels=IDS).mean() + 0.01 * penalty
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for key, parameter in model.named_parameters():
        # Optimizers of split matrices choose the group of ranks by it.
        assert getattr(parameter, "expert_tp", False) == ("experts" in key)
        parameter.requires_grad = "experts" not in key
    assert not model.decoder.layers[1].mlp.experts.linear_fc1.weight.requires_grad
    # A part of a state: torch's rules for parameters of their own.
    state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    lacking = inner + name.format("linear_fc1", 2)
    kept = model.state_dict()[lacking].clone()
    del state[lacking]
    assert model.load_state_dict(dict(state), strict=False) == ([lacking], [])
    after = model.state_dict()
    assert torch.equal(after[lacking], kept) and all(torch.equal(after[key], state[key]) for key in state)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*" + lacking):
        model.load_state_dict(state)
    # Experts of a rank are frozen together.
    parameters = dict(model.named_parameters())
    parameters[lacking].requires_grad_()
    assert parameters[lacking].requires_grad and not parameters[inner + name.format("linear_fc1", 1)].requires_grad
    with pytest.raises(ConfigError, match=r"requires_grad=False for experts \[0, 1, 3\] of 4 in linear_fc1.weight"):
        model(IDS, labels=IDS)


def test_packed_documents_see_nothing_of_one_another() -> None:  # C45
    model, changed = gpt(), IDS.clone()
    changed[0, :5] = 3
    borders = torch.tensor([0, 5, 12, 20, 24])
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    before, after = (model(ids, packed_seq_params=packed) for ids in (IDS, changed))
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, :5], after[0, :5])
    with pytest.raises(ConfigError, match=r"\[10, 14\) crosses"):
        model(IDS, packed_seq_params=PackedSeqParams(cu_seqlens_q=torch.tensor([0, 10, 14, 24])))


def test_the_seed_is_that_of_megatrons_function() -> None:
    first, again = gpt(), gpt()
    model_parallel_cuda_manual_seed(8)
    other = GPTModel(config(), get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    weights = [m.embedding.word_embeddings.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_dropout_counts_the_sequences() -> None:
    model = gpt(config(hidden_dropout=0.2))
    losses = [model(IDS, labels=IDS) for _ in range(2)]
    assert not torch.equal(*losses)
    numbered = [model(IDS, labels=IDS, sample_index=torch.tensor([4, 5])) for _ in range(2)]
    assert torch.equal(*numbered)
    assert torch.equal(*(model.eval()(IDS, labels=IDS) for _ in range(2)))


class Doubling(nn.Module):
    """A user-defined MLP."""

    def __init__(self, config: TransformerConfig, layer_number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0 * layer_number, dtype=config.params_dtype))
        self.weight.init_method = nn.init.ones_

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden * self.weight, None


def test_parts_of_a_layer_can_be_a_callers_own() -> None:
    parts = get_gpt_layer_local_submodules()
    parts.mlp, parts.pre_mlp_layernorm = ModuleSpec(Doubling), IdentityOp
    settings = config(perform_initialization=False)
    layer = TransformerLayer(settings, parts, layer_number=2, add_layer_offset=False)
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    with torch.no_grad():
        layer.self_attention.linear_proj.weight.zero_()
        layer.mlp.module.weight.fill_(4.0)
    hidden, context = layer(x)
    torch.testing.assert_close(hidden, 5.0 * x, rtol=0, atol=1e-12)
    assert context is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpt(config(num_moe_experts=4)), "use get_gpt_decoder_block_spec"),
        (lambda: gpt(spec=get_gpt_layer_local_spec(num_experts=4)), "has experts"),
        (lambda: gpt(config(fp4="e2m1", qk_clip=True)), "fp4='e2m1', qk_clip=True"),
        (lambda: gpt(config(fp8="e5m2")), "fp8='e5m2' is none of e4m3, hybrid"),
        (lambda: gpt(config(fp8="hybrid", fp8_recipe="custom")), "fp8_recipe='custom' is none of delayed"),
        (lambda: gpt(position_embedding_type="mrope"), "none of learned_absolute, rope, none"),
        (lambda: gpt(mtp_block_spec=object()), "mtp_block_spec without mtp_num_layers is not supported"),
        (
            lambda: gpt(config(num_moe_experts=4, moe_router_load_balancing_type="global_aux_loss")),
            "global_aux_loss is",
        ),
        (
            lambda: gpt(config(moe_router_load_balancing_type=["sinkhorn", "seq_aux_loss"], moe_aux_loss_coeff=[1, 2])),
            r"moe_router_load_balancing_type=\['sinkhorn', 'seq_aux_loss'\].* no other type; set the other",
        ),
        (lambda: gpt(config(moe_router_load_balancing_type=["none"] * 2)), "give one coefficient for each type"),
        (lambda: gpt(config(moe_router_load_balancing_type="aux")), "'aux' is none of seq_aux_loss, aux_loss"),
        (lambda: get_gpt_layer_local_spec(use_kitchen=True), "use_kitchen is not supported"),
        (lambda: gpt()(IDS, decoder_input=IDS), "decoder_input"),
        (lambda: config(num_attention_heads=3, tensor_model_parallel_size=2), "num_attention_heads=3 must be"),
        (lambda: config(sequence_parallel=True), "tensor_model_parallel_size > 1"),
        (lambda: config(pipeline_model_parallel_size=2), "pipeline_dtype=None"),
        (lambda: gpt(config(activation_func=torch.tanh)), "activation_func=tanh"),
    ],
)
def test_what_is_not_supported_is_said(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_experts_where_the_configuration_has_them() -> None:
    settings = config(num_moe_experts=4, moe_layer_freq=[0, 1], add_bias_linear=False)
    model = gpt(settings, get_gpt_decoder_block_spec(settings, use_transformer_engine=False))
    model(IDS, labels=IDS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert ["router" in dict(layer.mlp.named_children()) for layer in model.decoder.layers] == [False, True]
    assert model.decoder.layers[-1] is model.decoder.layers["1"]
    assert list(model.decoder.layers) == list(model.decoder.layers.values())


def local_logits() -> tuple[int, bool]:
    parallel_state.initialize_model_parallel(2)
    model = gpt(config(tensor_model_parallel_size=2))
    whole = model(IDS, runtime_gather_output=True)
    rank = parallel_state.get_tensor_model_parallel_rank()
    part = model(IDS)
    return part.shape[-1], torch.equal(part, whole[..., 24 * rank : 24 * (rank + 1)])


def test_parallel_output_is_this_ranks_columns() -> None:
    assert run_ranks(2, local_logits) == [(24, True), (24, True)]


def test_layers_of_a_stage() -> None:
    pipeline = {"pipeline_dtype": torch.float64, "num_layers": 8, "pipeline_model_parallel_size": 2}
    chunks = config(**pipeline, virtual_pipeline_model_parallel_size=2)
    assert [get_transformer_layer_offset(chunks, v, r) for v in (0, 1) for r in (0, 1)] == [0, 2, 4, 6]
    uneven = config(**pipeline, num_layers_in_first_pipeline_stage=3)
    assert [get_num_layers_to_build(uneven, pp_rank=r) for r in (0, 1)] == [3, 5]
    accounted = config(**pipeline | {"num_layers": 7}, account_for_loss_in_pipeline_split=True)
    assert [get_num_layers_to_build(accounted, pp_rank=r) for r in (0, 1)] == [4, 3]
    drawn = config(**pipeline, pipeline_model_parallel_layout="Ettt|tttttL")
    assert [get_num_layers_to_build(drawn, pp_rank=r) for r in (0, 1)] == [3, 5]
    listed = [["embedding"], ["decoder"] * 6, ["decoder"] * 2, ["loss"]]
    lists = config(**pipeline, pipeline_model_parallel_layout=listed)
    assert lists.virtual_pipeline_model_parallel_size == 2
    assert [get_num_layers_to_build(lists, v, r) for v in (0, 1) for r in (0, 1)] == [0, 6, 2, 0]
    assert get_transformer_layer_offset(replace(lists), 1, 0) == 6
    with pytest.raises(LayoutError, match="it has 8 decoder layers, not 9"):
        config(**pipeline | {"num_layers": 9}, pipeline_model_parallel_layout=listed)
    with pytest.raises(ConfigError, match="has 2 chunks per rank"):
        config(**pipeline, pipeline_model_parallel_layout=listed, virtual_pipeline_model_parallel_size=4)
    with pytest.raises(LayoutError, match="num_layers=7 cannot be divided"):
        get_num_layers_to_build(config(**pipeline | {"num_layers": 7}))


def test_a_block_is_the_models_decoder() -> None:
    settings, model = config(), gpt(position_embedding_type="none")
    block = TransformerBlock(settings, get_gpt_layer_local_spec())
    hidden = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    model.decoder.load_state_dict(block.state_dict())
    twin = GPTModel(
        settings, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, False, False, position_embedding_type="none"
    )
    assert {name: p.sum().item() for name, p in twin.decoder.layers.named_parameters()} == {
        name: p.sum().item() for name, p in block.layers.named_parameters()
    }
    twin.set_input_tensor(hidden)
    torch.testing.assert_close(block.final_layernorm(twin(IDS)), block(hidden, None), rtol=0, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_angles_of_a_block_are_the_models(interleaved: bool) -> None:
    settings = config(rotary_interleaved=interleaved)
    model = gpt(settings, position_embedding_type="rope", post_process=False)
    block = TransformerBlock(settings, get_gpt_layer_local_spec(), post_process=False)
    angles = RotaryEmbedding(4, 1.0, rotary_interleaved=interleaved)(LENGTH)
    embedded = model.embedding.word_embeddings(IDS).transpose(0, 1)
    torch.testing.assert_close(block(embedded, None, rotary_pos_emb=angles), model(IDS), rtol=0, atol=1e-12)


def product_of_parallel_layers() -> tuple[bool, ...]:
    parallel_state.initialize_model_parallel(2)
    settings = config(tensor_model_parallel_size=2)
    given = {"config": settings, "init_method": settings.init_method, "bias": True}
    up = ColumnParallelLinear(16, 32, **given, is_expert=False, tp_comm_buffer_name="fc1", stride=1)
    down = RowParallelLinear(32, 16, **given, input_is_parallel=True, skip_bias_add=False, name="fc2")
    x = torch.randn(3, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out, _ = down(up(x)[0])
    out.sum().backward()
    trained, x.grad = x.grad, None
    inner = linear_with_frozen_weight(x, up.weight, up.bias, False, True, False)
    before = up.weight.grad.clone()
    down(inner)[0].sum().backward()
    return torch.equal(trained, x.grad), torch.equal(before, up.weight.grad), out.shape == x.shape


def test_parallel_layers_take_megatrons_arguments() -> None:
    assert run_ranks(2, product_of_parallel_layers) == [(True, True, True)] * 2
    with pytest.raises(LayoutError, match="is_expert=True is not supported"):
        ColumnParallelLinear(4, 4, is_expert=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'strides'"):
        ColumnParallelLinear(4, 4, strides=1)


def test_masks_and_forms_of_gelu() -> None:
    window = get_sliding_window_causal_mask(3, 4, (1, 0))
    assert (~window).int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    scores = attention_mask_func(torch.zeros(2, 2), get_default_causal_mask(2))
    assert scores.tolist() == [[0.0, -10000.0], [0.0, 0.0]]
    assert config(activation_func=openai_gelu).model_config().openai_gelu


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
        {"moe_layer_recompute": True, "num_moe_experts": 4},
    ],
)
def test_selective_recompute_gives_the_same_gradients(settings: dict[str, Any]) -> None:
    experts = settings.get("num_moe_experts")
    spec = get_gpt_layer_local_spec(num_experts=experts)
    kept, dropped = (gpt(config(**{"num_moe_experts": experts} | more), spec) for more in ({}, settings))
    wanted = settings.get("recompute_modules", ["core_attn", "moe"] if experts else ["core_attn"])
    assert dropped.config.recompute_modules == wanted
    for model in (kept, dropped):
        model(IDS, labels=IDS).sum().backward()
    for ours, expected in zip(dropped.parameters(), kept.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=0, atol=1e-12)


def test_modules_to_recompute_are_checked() -> None:
    assert config().recompute_modules == ["core_attn"]
    with pytest.raises(ConfigError, match=r"recompute_modules=\['attention'\] has modules that are none of core_attn"):
        config(recompute_modules=["attention"])


def test_the_configuration_takes_what_the_launcher_takes() -> None:
    refused = {each.name for each in fields(TransformerConfig) if "refused" in each.metadata}
    accepted = {name.rstrip("=") for names in ACCEPTED.values() for name in names.split()}
    assert "moe_enable_deepep" in accepted
    # The positions of images for position_embedding_type="mrope"; GPTModel has no pattern of layers.
    assert accepted & refused == {"mrope_section", "is_hybrid_model"}


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": None},
        {"cuda_graph_impl": "local", "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
        {"mamba_state_dim": 64, "qk_clip_alpha": 0.4, "fp4_recipe": "custom"},  # of disabled features
    ],
)
def test_settings_of_transport_and_of_other_features_change_nothing(settings: dict[str, Any]) -> None:
    spec = get_gpt_layer_local_spec(num_experts=4)
    models = [gpt(config(num_moe_experts=4, **more), spec) for more in ({}, settings)]
    torch.testing.assert_close(*(model(IDS) for model in models), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("types", "coefficients"), [(["aux_loss"], [0.1]), (["aux_loss"], 0.1), (["none", "aux_loss"], [0.0, 0.1])]
)
def test_types_of_load_balancing_as_a_list(types: list[str], coefficients: Any) -> None:
    given = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    listed = {"moe_router_load_balancing_type": types, "moe_aux_loss_coeff": coefficients}
    gradients = []
    for settings in (given, listed):
        model = gpt(config(num_moe_experts=4, add_bias_linear=False, **settings), get_gpt_layer_local_spec(4))
        model(IDS, labels=IDS).sum().backward()
        gradients.append(model.decoder.layers[0].mlp.router.weight.grad)
    assert torch.equal(*gradients)


def test_changes_of_the_configuration_reach_the_model() -> None:
    """The outputs equal those of a model built with the changed values."""
    losses = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
    changed = {"moe_aux_loss_coeff": 0.7, "moe_z_loss_coeff": 0.2, "moe_router_topk_scaling_factor": 2.5}
    changed |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    gradients, experts = [], {"num_moe_experts": 4, "add_bias_linear": False, **losses}
    for early, late in ((changed, {}), ({}, changed)):
        settings = config(**experts | early)
        model = gpt(settings, get_gpt_layer_local_spec(4))
        for name, value in late.items():
            setattr(model.config, name, value)
        model(IDS, labels=IDS).sum().backward()
        gradients.append(model.decoder.layers[0].mlp.router.weight.grad)
        assert [name for name, value in changed.items() if getattr(settings, name) != value] == []
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("hidden_dropout", 0.3, "its layers cannot change hidden_dropout"),
        ("hidden_size", 32, "its layers cannot change"),
        ("recompute_granularity", "selective", "its layers cannot change recompute_modules"),
        ("moe_z_loss_coeff", 0.1, "its layers cannot change moe_z_loss_coeff"),
        ("params_dtype", torch.float32, "its layers cannot change params_dtype"),
        ("qk_clip", True, "do not support qk_clip=True"),
    ],
)
def test_changes_that_a_model_cannot_follow_are_errors(name: str, value: Any, reason: str) -> None:
    settings = config(num_moe_experts=4)
    model, old = gpt(settings, get_gpt_layer_local_spec(4)), getattr(settings, name)
    for other in (replace(settings), copy.copy(settings), copy.deepcopy(settings)):
        setattr(other, name, value)
    with pytest.raises(ConfigError, match=rf"{name}=.* cannot be set: a model was built with .*{reason}"):
        setattr(settings, name, value)
    assert getattr(settings, name) == old
    assert set(vars(settings)) == {field.name for field in fields(settings)}
    setattr(settings, name, old)
    settings.grad_scale_func = settings.no_sync_func = len  # the schedule reads them
    del model
    gc.collect()
    setattr(settings, name, value)
    assert getattr(settings, name) == value


@pytest.mark.parametrize("gated", [False, True])
def test_the_fused_gelu_is_the_tanh_approximation(gated: bool) -> None:
    """Compared with ``bias_gelu_impl`` and ``bias_geglu_impl`` of Megatron Core, which require biases."""
    for fused, biases in ((True, True), (True, False), (False, True)):
        model = config(bias_activation_fusion=fused, add_bias_linear=biases, gated_linear_unit=gated).model_config()
        assert (model.openai_gelu, model.geglu) == (fused and biases, gated)


def test_the_tanh_approximation_is_a_flag() -> None:
    for flag, function in (({"openai_gelu": True}, openai_gelu), ({}, torch.nn.functional.gelu)):
        args = Namespace(num_layers=2, hidden_size=16, num_attention_heads=4, **flag)
        assert core_transformer_config_from_args(args).activation_func is function
