"""A built model consists of instances of Megatron Core's classes, which can also be used separately."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_parts import MLP, SelfAttention, TopKRouter
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func, topk_routing_with_score_function
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, roll_tensor
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.test_gpt_model import IDS, LENGTH, MASK, config, gpt

X = torch.randn(LENGTH, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False}


def test_the_last_input_of_multi_token_prediction_is_token_0() -> None:
    """As Megatron's ``roll_tensor`` gives it; balancing losses depend on it."""
    settings = config(mtp_num_layers=1, moe_aux_loss_coeff=1.0, **EXPERTS)
    spec = get_gpt_layer_local_spec(num_experts=4)
    block = get_gpt_mtp_block_spec(settings, spec, False)
    separate = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    model = gpt(settings, spec, mtp_block_spec=block, **separate)
    labels = torch.full((2, LENGTH), 5)
    labels[:, -1] = 9
    model(torch.full((2, LENGTH), 5), labels=labels).sum().backward()
    size = model.embedding.word_embeddings.weight.grad.abs().sum(1)
    assert size[0] > 0 and size[9] == 0


def test_a_model_consists_of_megatrons_classes() -> None:
    settings = config(moe_layer_freq=[1, 0], mtp_num_layers=1, **EXPERTS)
    spec = get_gpt_layer_local_spec()
    blocks = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    model = gpt(settings, blocks, mtp_block_spec=get_gpt_mtp_block_spec(settings, spec, False))
    sparse, dense = model.decoder.layers
    assert isinstance(model, LanguageModule)
    expected: dict[Any, type] = {
        model.embedding: LanguageModelEmbedding,
        model.decoder: TransformerBlock,
        model.mtp: MultiTokenPredictionBlock,
        sparse: TransformerLayer,
        sparse.mlp: MoELayer,
        sparse.mlp.router: TopKRouter,
        dense.mlp: MLP,
        dense.self_attention: SelfAttention,
        dense.self_attention.core_attention: DotProductAttention,
        model.mtp.layers[0].mtp_model_layer: TransformerLayer,
    }
    for module, kind in expected.items():
        assert type(module) is kind and isinstance(module, MegatronModule)
    assert all(issubclass(kind, MegatronModule) for kind in (GPTModel, LanguageModule, *expected.values()))
    assert [layer.layer_number for layer in model.decoder.layers] == [1, 2]
    assert sparse.mlp.layer_number == 1
    owners = (model, model.decoder, sparse, sparse.mlp, dense.mlp, dense.self_attention)
    assert all(module.config is settings for module in owners)
    assert set(dense.mlp.sharded_state_dict("m.")) == {"m.linear_fc1.weight", "m.linear_fc2.weight"}


def test_layers_of_a_model_take_megatrons_arguments() -> None:
    """Called one by one, the modules compute the same as the model."""
    model = gpt(config(num_query_groups=2), position_embedding_type="rope").eval()
    angles = RotaryEmbedding(4, 1.0)(LENGTH)
    hidden = model.embedding(IDS, torch.arange(LENGTH).expand(2, -1))
    expected, outputs = model.decoder(hidden, None, rotary_pos_emb=angles, extract_layer_indices={0, 1})
    for layer, output in zip(model.decoder.layers, outputs, strict=True):
        hidden, context = layer(hidden, MASK, rotary_pos_emb=angles)
        torch.testing.assert_close(hidden, output, rtol=0, atol=1e-12)
        assert context is None
    torch.testing.assert_close(model.decoder.final_layernorm(hidden), expected, rtol=0, atol=1e-12)
    logits, _ = model.output_layer(expected)
    torch.testing.assert_close(logits.transpose(0, 1), model(IDS), rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"TransformerLayer\.forward: attention_bias is not supported"):
        layer(hidden, MASK, attention_bias=MASK)


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.padding])
def test_attention_alone(kind: AttnMaskType) -> None:
    """Compared with torch's attention over the same projections."""
    model_parallel_cuda_manual_seed(7)
    attention = SelfAttention(config(), layer_number=2, attn_mask_type=kind)
    assert torch.equal(attention.linear_qkv.weight, gpt().decoder.layers[1].self_attention.linear_qkv.weight)
    found, bias = attention(X)
    mixed = nn.functional.linear(X, attention.linear_qkv.weight, attention.linear_qkv.bias).unflatten(-1, (4, 3, 4))
    query, key, value = (mixed[..., i, :].permute(1, 2, 0, 3) for i in range(3))
    causal = kind is AttnMaskType.causal
    inner = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    expected = nn.functional.linear(inner.permute(2, 0, 1, 3).flatten(2), attention.linear_proj.weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert bias is attention.linear_proj.bias
    core = attention.core_attention(*(x.permute(2, 0, 1, 3) for x in (query, key, value)), None, attn_mask_type=kind)
    torch.testing.assert_close(core, inner.permute(2, 0, 1, 3).flatten(2), rtol=0, atol=1e-12)


def test_an_mlp_alone() -> None:
    model_parallel_cuda_manual_seed(7)
    first, second = (MLP(config(), ffn_hidden_size=24) for _ in range(2))
    assert not torch.equal(first.linear_fc1.weight, second.linear_fc1.weight)
    model_parallel_cuda_manual_seed(7)
    assert torch.equal(MLP(config(), ffn_hidden_size=24).linear_fc1.weight, first.linear_fc1.weight)
    found, bias = first(X)
    inner = nn.functional.gelu(nn.functional.linear(X, first.linear_fc1.weight, first.linear_fc1.bias))
    assert inner.shape[-1] == 24
    torch.testing.assert_close(found, inner @ first.linear_fc2.weight.T, rtol=0, atol=1e-12)
    assert bias is first.linear_fc2.bias
    with pytest.raises(ConfigError, match="input_size=8 is not supported"):
        MLP(config(), input_size=8)


class Scaled(SelfAttention):
    """A user-defined attention that scales the output of Megatron's."""

    def __init__(self, config: Any, submodules: Any = None, layer_number: int = 1, factor: float = 1.0) -> None:
        super().__init__(config, submodules, layer_number, AttnMaskType.causal)
        self.factor = factor

    def forward(self, hidden_states: Tensor, attention_mask: Any, **others: Any) -> Any:
        output, bias = super().forward(hidden_states, attention_mask, **others)
        return output * self.factor, bias


def test_a_callers_class_extends_megatrons() -> None:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention = ModuleSpec(Scaled, params={"factor": 1.0})
    plain, same = (gpt(config(), each, position_embedding_type="rope") for each in (None, spec))
    assert list(same.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(same(IDS), plain(IDS), rtol=0, atol=1e-12)
    for layer in same.decoder.layers:
        layer.self_attention.factor = 0.0
    for layer in plain.decoder.layers:
        nn.init.zeros_(layer.self_attention.linear_proj.weight)
    torch.testing.assert_close(same(IDS), plain(IDS), rtol=0, atol=1e-12)


def test_a_router_alone() -> None:
    model_parallel_cuda_manual_seed(7)
    settings = config(
        moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01, moe_router_load_balancing_type="aux_loss", **EXPERTS
    )
    router = TopKRouter(settings)
    x = X.clone().requires_grad_()
    probs, chosen = router(x)
    logits = (x @ router.weight.T).flatten(0, 1)
    expected, where = topk_routing_with_score_function(logits, 2)
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-12)
    assert torch.equal(chosen, where)
    # The gradient of only the auxiliary losses, by Megatron Core's formulas.
    probs.sum().backward()
    scores = logits.softmax(-1)
    counts = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0).sum(0)
    balance = switch_load_balancing_loss_func(scores, counts, LENGTH * 2, 2, 4, 0.1)
    z = logits.logsumexp(-1).square().mean() * 0.01
    (by_hand,) = torch.autograd.grad(expected.sum() + balance + z, x)
    torch.testing.assert_close(x.grad, by_hand, rtol=0, atol=1e-12)


def test_padding_counts_neither_in_losses_nor_in_loads() -> None:
    settings = config(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="aux_loss", **EXPERTS)
    gradients = []
    for length in (LENGTH, 9):
        model_parallel_cuda_manual_seed(7)
        layer = MoELayer(settings, layer_number=1)
        padding = (torch.arange(length) >= 9).expand(2, -1)
        output, _ = layer(X[:length], padding_mask=padding)
        (output[:9] * X[:9]).sum().backward()
        gradients.append(layer.router.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    model = gpt(settings, get_gpt_layer_local_spec(4))
    values = []
    for mask in (None, torch.zeros_like(IDS, dtype=torch.bool), (torch.arange(LENGTH) >= 9).expand(2, -1)):
        model(IDS, labels=IDS, padding_mask=mask)
        totals = model.auxiliary_losses.totals(torch.device("cpu"), owns_loss=True).tolist()
        values += model.auxiliary_losses.means(totals).values()
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    assert not math.isclose(values[0], values[2], rel_tol=1e-6)


def test_layers_that_predict_further_alone() -> None:
    settings = config(mtp_num_layers=2)
    spec = get_gpt_layer_local_spec()
    blocks = get_gpt_mtp_block_spec(settings, spec, False)
    model = gpt(settings, mtp_block_spec=blocks, position_embedding_type="none").eval()
    model_parallel_cuda_manual_seed(7)
    block = MultiTokenPredictionBlock(settings, blocks).eval()
    for name, weight in block.state_dict().items():
        assert torch.equal(weight, model.mtp.state_dict()[name]), name
    found = block(IDS, torch.arange(LENGTH).expand(2, -1), X, None, embedding=model.embedding)
    expected, ids, context = [X], IDS, model.decoder.sequence(X)
    for layer in model.mtp.layers:
        ids, _ = roll_tensor(ids)
        embedded = nn.functional.embedding(ids, model.embedding.word_embeddings.weight).transpose(0, 1)
        expected.append(layer(embedded, expected[-1], context))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("extra", [{"mtp_hsm": True}, {"mtp_use_repeated_layer": True}])
def test_depths_of_layers_that_predict_further_alone(extra: dict[str, bool]) -> None:
    """Mixed hidden states are those of an earlier depth at a later position; a repeated layer has all depths."""
    settings = config(mtp_num_layers=3, **extra)
    blocks = get_gpt_mtp_block_spec(settings, get_gpt_layer_local_spec(), False)
    model_parallel_cuda_manual_seed(7)
    block = MultiTokenPredictionBlock(settings, blocks)
    model = gpt(settings, mtp_block_spec=blocks, position_embedding_type="none")
    inputs = list[Tensor]()
    block.layers[-1].register_forward_pre_hook(lambda _, given: inputs.append(given[1].detach()))
    context = block.with_losses((), X, block.sequence(X, None, None, None, None))
    assert context.sample_index is not None
    outputs = block(IDS, torch.arange(LENGTH).expand(2, -1), X, None, embedding=model.embedding).chunk(4)
    if "mtp_hsm" not in extra:
        assert [torch.equal(given, output) for given, output in zip(inputs, outputs, strict=False)] == [True] * 3
        return
    origins = [(inputs[0][: LENGTH - 2 + k] == outputs[k][2 - k :]).all(-1) for k in range(3)]
    assert all(0 < origin.sum() < origin.numel() for origin in origins)
    assert sum(int(origin[: LENGTH - 2].sum()) for origin in origins) == (LENGTH - 2) * 2


def load_of(router: TopKRouter, found: list[Tensor]) -> None:
    """Append the number of tokens of each expert in every forward pass."""

    def note(module: Any, inputs: Any, routing: Any) -> None:
        found.append(torch.bincount(routing.experts.flatten(), minlength=4).double())

    router.register_forward_hook(note)


def biased(alone: bool, with_groups: bool) -> tuple[list[float], list[float], torch.dtype]:
    """The bias after a step of two micro-batches on each rank, this rank's loads, and the dtype in a 16-bit model."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)
    settings = config(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", **EXPERTS)
    inner: Any = MoELayer(settings, layer_number=2) if alone else gpt(settings, get_gpt_layer_local_spec(4))
    layer = inner if alone else inner.decoder.layers[0].mlp
    model = DistributedDataParallel(settings, DistributedDataParallelConfig(), inner)
    rank, loads = parallel_state.get_data_parallel_rank(), list[Tensor]()
    load_of(layer.router, loads)
    for step in range(2):
        for micro in range(2):
            given = (X + rank + 2 * micro + step,) if alone else ((IDS + 5 * rank + 3 * micro + step) % 48,)
            output = model(*given)
            (output[0] if alone else output).sum().backward()
        groups = ProcessGroupCollection.use_mpu_process_groups() if with_groups else None
        finalize_model_grads([model], pg_collection=groups)
        with torch.no_grad():
            model(*given)  # evaluation is not counted
            loads.pop()
    bias = layer.router.expert_bias.tolist()
    Float16Module(config(bf16=True), inner)
    return bias, torch.stack(loads).view(2, 2, 4).sum(1).tolist(), layer.router.expert_bias.dtype


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_biases_of_experts_follow_the_loads_of_all_ranks(alone: bool, ranks: int) -> None:
    """bias += 0.001 sign(mean load - load) after every step (Wang et al. 2024, algorithm 1)."""
    found = run_ranks(ranks, biased, alone, ranks == 2)
    loads = torch.tensor([loads for _, loads, _ in found], dtype=torch.float64).sum(0)
    expected = sum(0.001 * (load.mean() - load).sign() for load in loads)
    for bias, _, dtype in found:
        assert bias == pytest.approx(expected.tolist(), abs=1e-9) and max(map(abs, bias)) > 0
        assert dtype is torch.float32


def foreign_groups() -> None:
    parallel_state.initialize_model_parallel(2)
    model = DistributedDataParallel(config(), DistributedDataParallelConfig(), nn.Linear(2, 2))
    wrong = ProcessGroupCollection(dp_cp=parallel_state.get_tensor_model_parallel_group())
    with pytest.raises(ConfigError, match=r"finalize_model_grads: pg_collection.dp_cp has the ranks \[0, 1\], but"):
        finalize_model_grads([model], pg_collection=wrong)


def test_groups_of_another_layout_are_refused() -> None:
    run_ranks(2, foreign_groups)


def tokens_of_a_pipeline() -> list[float]:
    parallel_state.initialize_model_parallel(1, 2)
    model = DistributedDataParallel(config(), DistributedDataParallelConfig(), nn.Linear(2, 2, bias=False))
    model(torch.ones(1, 2)).sum().backward()
    # As after Megatron's broadcast from the last stage, whatever the first stage had.
    finalize_model_grads([model], torch.tensor([7, 4][parallel_state.get_pipeline_model_parallel_rank()]))
    return model.module.weight.main_grad.flatten().tolist()


def test_tokens_are_those_of_the_last_stage() -> None:
    assert run_ranks(2, tokens_of_a_pipeline) == [[0.25] * 4] * 2


def parts_of_ranks(tp: int, sp: bool) -> list[Tensor]:
    """Outputs of only the attention, the MLP and the block, gathered over the sequence, and the gradient of the
    input."""
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(7)
    settings = config(tensor_model_parallel_size=tp, sequence_parallel=sp)
    group, rank = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_rank()
    attention = SelfAttention(settings, layer_number=1, attn_mask_type=AttnMaskType.causal)
    modules = [attention, MLP(settings, name="m"), TransformerBlock(settings, get_gpt_layer_local_spec())]
    found = []
    for module in modules:
        x = (X.chunk(tp)[rank] if sp else X).clone().requires_grad_()
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        (output * output.detach().cos()).sum().backward()
        for part in (output.detach(), x.grad):
            found.append(gather_from_sequence_parallel_region(part, group=group) if sp else part)
    return found


@pytest.mark.parametrize("sp", [False, True])
def test_parts_alone_on_two_ranks(sp: bool) -> None:
    (expected,) = run_ranks(1, parts_of_ranks, 1, False)
    for found in run_ranks(2, parts_of_ranks, 2, sp):
        for ours, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)
