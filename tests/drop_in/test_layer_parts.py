"""Parts of layers under Megatron Core's names: specifications with Transformer Engine's, norms, attention, experts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron.core
from megatron.core.activations import fast_gelu, quick_gelu
from megatron.core.config_logger import has_config_logger_enabled, log_config_to_disk
from megatron.core.enums import Fp8Recipe
from megatron.core.extensions import transformer_engine as te
from megatron.core.fp8_utils import get_fp8_context, is_float8tensor
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.jit import jit_fuser
from megatron.core.models.common.embeddings import RotaryEmbedding, apply_rotary_pos_emb
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.msc_utils import MultiStorageClientFeature, maybe_msc
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_context import MLPSubmodules, SelfAttentionSubmodules
from megatron.core.transformer.module import Float16Module, MegatronModule, mark_keep_in_fp32
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss, roll_tensor
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
    set_model_config_attribute,
    set_model_to_sequence_parallel,
    sharded_state_dict_default,
)
from megatron.core.utils import (
    WrappedTensor,
    configure_nvtx_profiling,
    deprecate_inference_params,
    get_batch_on_this_cp_rank,
    make_viewless_tensor,
    nvtx_range_pop,
    nvtx_range_push,
)
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.experts.router import Router
from megatron_core.parallel.groups import ALONE, LocalGroup
from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.mlp import MLP
from tests.drop_in.test_gpt_model import IDS, LENGTH, config, gpt
from tests.plain.experts import rounded_to_mxfp8


def spec(**parts: Any) -> ModuleSpec:
    """A layer as written for Transformer Engine: norms are part of the projections after them."""
    attention = {
        "linear_qkv": te.TELayerNormColumnParallelLinear,
        "core_attention": te.TEDotProductAttention,
        "linear_proj": te.TERowParallelLinear,
        "q_layernorm": IdentityOp,
    }
    mlp = {"linear_fc1": te.TELayerNormColumnParallelLinear, "linear_fc2": te.TERowParallelLinear}
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,
            self_attention=ModuleSpec(
                SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(**attention | parts),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(**mlp)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def test_a_specification_with_transformer_engines_modules_gives_the_same_model() -> None:
    expected, found = gpt(), gpt(spec=spec())
    keys = {entry.key for entry in found.sharded_state_dict().values()}
    assert keys == {entry.key for entry in expected.sharded_state_dict().values()}
    assert torch.equal(found(IDS), expected(IDS))
    normed = gpt(config(qk_layernorm=True), spec(q_layernorm=te.TENorm, k_layernorm=te.TENorm))
    assert torch.equal(normed(IDS), gpt(config(qk_layernorm=True), get_gpt_layer_local_spec(qk_layernorm=True))(IDS))


class Mine(ColumnParallelLinear):
    """A user-defined module."""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"linear_qkv": Mine}, "linear_qkv=.*Mine.* is not a class of this package"),
        ({"q_layernorm": te.TENorm}, "qk_layernorm"),
    ],
)
def test_parts_that_would_not_be_used_are_errors(parts: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpt(spec=spec(**parts))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_and_projections_alone(kind: str) -> None:
    settings, x = config(normalization=kind), torch.randn(5, 2, 16, dtype=torch.float64)
    norm = te.TENorm(settings, 16, eps=1e-4)
    assert norm.eps == 1e-4 and norm.weight.dtype == torch.float64
    joined = te.TELayerNormColumnParallelLinear(16, 8, config=settings, bias=False)
    plain = nn.functional.rms_norm if kind == "RMSNorm" else nn.functional.layer_norm
    expected = plain(x, (16,), eps=1e-5) @ joined.weight.t()
    torch.testing.assert_close(joined(x)[0], expected, rtol=0, atol=1e-12)
    assert {name for name, _ in joined.named_parameters()} >= {"weight", "layer_norm_weight"}


def test_attention_alone() -> None:
    settings = config(num_query_groups=2)
    attention = DotProductAttention(settings, 1, AttnMaskType.causal)
    query, key, value = (torch.randn(LENGTH, 2, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    scores = torch.einsum("sbhd,tbhd->bhst", query, key.repeat_interleave(2, 2)) / 2.0
    weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
    expected = torch.einsum("bhst,tbhd->sbhd", weights, value.repeat_interleave(2, 2)).flatten(2)
    for given in (None, mask):
        torch.testing.assert_close(attention(query, key, value, given), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_of_heads(interleaved: bool) -> None:
    """Compared with complex numbers: pair i is rotated by position / 10000^(2i/r)."""
    x = torch.randn(LENGTH, 2, 3, 8, dtype=torch.float64)
    angles = RotaryEmbedding(8, 0.5, rotary_interleaved=interleaved)(LENGTH)
    found = apply_rotary_pos_emb(x, angles, SimpleNamespace(rotary_interleaved=interleaved))
    pairs = x[..., :4].unflatten(-1, (2, 2))
    numbers = torch.complex(*(pairs if interleaved else pairs.transpose(-1, -2)).unbind(-1))
    turn = torch.arange(LENGTH, dtype=torch.float64)[:, None] / 10000 ** torch.tensor([0.0, 0.5], dtype=torch.float64)
    turned = numbers * torch.polar(torch.ones_like(turn), turn)[:, None, None]
    parts = [turned.real, turned.imag]
    expected = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    torch.testing.assert_close(found, torch.cat([expected, x[..., 4:]], -1), rtol=0, atol=1e-12)


def test_queries_and_keys_have_the_same_angles() -> None:
    model = gpt().eval()
    size = model.config.hidden_size // model.config.num_attention_heads
    hidden = torch.randn(LENGTH, 2, model.config.hidden_size, dtype=torch.float64)
    angles, others = (RotaryEmbedding(size, 1.0, rotary_base=base)(LENGTH) for base in (10_000, 100))
    expected = model.decoder(hidden, None, rotary_pos_emb=angles)
    for pair in ((angles, angles), [angles, angles.clone()]):
        assert torch.equal(model.decoder(hidden, None, rotary_pos_emb=pair), expected)
    for pair in ((angles, others), (None, angles)):
        with pytest.raises(ConfigError, match="rotary_pos_emb has two different tensors"):
            model.decoder(hidden, None, rotary_pos_emb=pair)


def test_the_embedding_alone() -> None:
    model_parallel_cuda_manual_seed(7)
    embedding = LanguageModelEmbedding(config(), 48, LENGTH)
    expected = gpt().embedding
    assert expected is not None
    positions = torch.arange(LENGTH).expand(2, -1)
    words, places = embedding.word_embeddings.weight, embedding.position_embeddings.weight
    assert torch.equal(embedding(IDS, positions), (words[IDS] + places[positions]).transpose(0, 1))
    assert torch.equal(words, expected.word_embeddings.weight)
    embedding.zero_parameters()
    assert not embedding(IDS, positions).any()


def test_choices_and_losses_of_a_router() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.5, 1.0]])
    probs, chosen = moe_utils.topk_routing_with_score_function(logits, 2, scaling_factor=2.0)
    assert chosen.tolist() == [[True, True, False, False], [False, True, True, False]]
    torch.testing.assert_close(probs[0, :2], 2.0 * torch.tensor([2.0, 1.0]).softmax(-1))
    dense, experts = moe_utils.topk_routing_with_score_function(logits, 2, use_pre_softmax=True, dense_output=True)
    torch.testing.assert_close(dense, logits.softmax(-1).gather(1, experts))
    scores, best = moe_utils.group_limited_topk(logits.sigmoid(), 1, 2, 4, num_groups=2, group_topk=1)
    assert best.tolist() == [[0], [1]] and torch.equal(scores, logits.sigmoid().gather(1, best))
    load = torch.tensor([3.0, 1.0])
    given = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    loss = moe_utils.switch_load_balancing_loss_func(given, load, 4, 2, 2, 0.1)
    assert loss.item() == pytest.approx(0.1 * 2 / (2 * 16) * (3 * 1.5 + 1 * 0.5))
    mask = torch.tensor([False, True])
    assert moe_utils.z_loss_func(logits, 0.5, mask).item() == pytest.approx(0.5 * logits[0].logsumexp(0).item() ** 2)
    assert moe_utils.get_capacity(10, 4, 1.25) == 4 and moe_utils.get_capacity(1, 4, 1.0, 3) == 3
    torch.testing.assert_close(moe_utils.get_updated_expert_bias(load, torch.zeros(2), 0.1), torch.tensor([-0.1, 0.1]))
    counts, local, total = moe_utils.get_tokens_per_expert_and_token_count(chosen, ALONE)
    assert (counts.tolist(), local, total) == ([1, 2, 1, 0], 2, 2)
    padded = torch.cat([chosen, torch.zeros(1, 4, dtype=torch.bool)])  # a token that does not count
    numbers = moe_utils.get_tokens_per_expert_and_token_count(padded, ALONE, 2, with_padding_mask=True)
    assert [number.sum().item() for number in numbers] == [4, 2, 2]
    x = torch.ones(2, dtype=torch.bfloat16)
    assert moe_utils.router_gating_linear(x, torch.ones(3, 2), None, torch.float32).tolist() == [2.0, 2.0, 2.0]


def test_a_loss_that_joins_in_backward() -> None:
    x, aux = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(4.0))
    moe_utils.MoEAuxLossAutoScaler.apply(x * 3, aux * 5).sum().backward()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    assert x.grad.tolist() == [3.0, 3.0] and aux.grad.item() == 20.0


def test_routers_repeat_what_was_recorded() -> None:
    RouterReplay.clear_global_router_replay_instances()
    settings = config(
        num_moe_experts=4, moe_router_topk=2, moe_enable_routing_replay=True, recompute_granularity="full"
    )
    model = gpt(settings, get_gpt_layer_local_spec(num_experts=4))
    assert len(RouterReplay.global_router_replay_instances) == 2
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    before = model(IDS)
    recorded = RouterReplay.get_recorded_data()
    assert [each.shape for each in recorded] == [(IDS.numel(), 2)] * 2
    RouterReplay.set_replay_data(recorded)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    assert torch.equal(model(IDS), before)
    RouterReplay.set_replay_data([(each + 1) % 4 for each in recorded])
    other = model(IDS)
    assert not torch.equal(other, before)
    RouterReplay.set_replay_data([(each + 1) % 4 for each in recorded])
    losses = model(IDS, labels=IDS).sum()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    losses.backward()
    RouterReplay.clear_global_router_replay_action()
    assert torch.equal(model(IDS), before)
    with pytest.raises(LayoutError, match="1 choices for 2 layers"):
        RouterReplay.set_replay_data(recorded[:1])
    RouterReplay.clear_global_indices()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(LayoutError, match="nothing was given"):
        model(IDS)
    RouterReplay.clear_global_router_replay_instances()


class Lin(MegatronModule):
    """A module with a weight that stays in float32."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.linear, self.is_first_microbatch = nn.Linear(2, 1), False
        self.kept = mark_keep_in_fp32(nn.Parameter(torch.zeros(4)))


def test_modules_in_16_bits() -> None:
    settings = config(bf16=True)
    module = Float16Module(settings, Lin(settings)).module
    assert (module.linear.weight.dtype, module.kept.dtype) == (torch.bfloat16, torch.float32)
    module.set_is_first_microbatch()
    assert not module.is_first_microbatch
    settings.quant_recipe = object()
    module.set_is_first_microbatch()
    assert module.is_first_microbatch


def test_settings_of_built_models() -> None:
    assert [is_layer_window_attention((4, 0), 3, n) for n in (1, 2, 3)] == [True, True, False]
    assert [is_layer_window_attention((4, 0), [1, 0], n) for n in (1, 2)] == [True, False]
    assert is_layer_window_attention((4, 0), None, 9) and not is_layer_window_attention(None, 3, 1)
    with pytest.raises(ValueError, match="Invalid `window_attn_skip_freq`: str"):
        is_layer_window_attention((4, 0), "x", 1)  # type: ignore[arg-type]
    model = gpt()
    set_model_config_attribute(SimpleNamespace(module=model), "timers", "t")
    assert model.config.timers == "t"
    set_model_to_sequence_parallel(model, False)
    with pytest.raises(ConfigError, match="build the model with it"):
        set_model_to_sequence_parallel(model, True)


def test_small_functions(tmp_path: Path) -> None:
    torch.testing.assert_close(quick_gelu(torch.tensor(1.0)), torch.sigmoid(torch.tensor(1.702)))
    torch.testing.assert_close(fast_gelu(torch.tensor(1.0)), nn.functional.gelu(torch.tensor(1.0), approximate="tanh"))
    assert jit_fuser(fast_gelu) is fast_gelu
    with get_fp8_context(config()):
        assert not is_float8tensor(torch.ones(1))
    with get_fp8_context(config(fp8="hybrid")):
        pass
    settings = config(config_logger_dir=str(tmp_path / "logs"))
    assert has_config_logger_enabled(settings) and not has_config_logger_enabled(config())
    log_config_to_disk(settings, {"self": 1, "size": 2, "kind": Lin}, prefix="x")
    assert json.loads((tmp_path / "logs" / "x.rank_0.json").read_text()) == {"size": 2, "kind": repr(Lin)}
    assert maybe_msc.open is open and maybe_msc.path_isdir(str(tmp_path)) and not MultiStorageClientFeature.is_enabled()
    context = megatron.core.InferenceParams(2, 8)
    assert context.is_static_batching() and deprecate_inference_params(None, context) is context
    held = WrappedTensor(torch.ones(1))
    assert held.unwrap().item() == 1
    with pytest.raises(IndexError):
        held.unwrap()
    whole = torch.ones(4, requires_grad=True)
    view = make_viewless_tensor(whole[:2], requires_grad=True, keep_graph=True)
    assert view._base is None and view.grad_fn is not None
    assert make_viewless_tensor(whole * 2, requires_grad=False, keep_graph=False).is_leaf


def test_a_batch_of_a_context_parallel_rank() -> None:
    class Second(LocalGroup):
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    tokens = torch.arange(16).view(2, 8)
    mask = torch.arange(64).view(1, 1, 8, 8).expand(2, -1, -1, -1)
    batch = {"tokens": tokens, "attention_mask": mask, "length": torch.tensor(8), "none": None}
    found = get_batch_on_this_cp_rank(batch, Second())
    assert found["tokens"].tolist() == tokens[:, 2:6].tolist()
    assert torch.equal(found["attention_mask"], mask[:, :, 2:6])
    assert found["length"] == 8 and found["none"] is None


def test_parts_of_specifications_have_their_classes() -> None:
    parts = get_gpt_layer_local_spec(num_experts=4).submodules
    model = gpt(config(num_moe_experts=4), get_gpt_layer_local_spec(4))
    assert isinstance(model.decoder.layers["0"].mlp.router, Router)
    assert parts.mlp.module is MoELayer and isinstance(parts.mlp.submodules, MoESubmodules)
    dense = get_gpt_layer_local_spec().submodules
    assert dense.mlp.submodules == MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    assert dense.self_attention.submodules.linear_proj is RowParallelLinear


def test_tokens_that_follow() -> None:
    ids = torch.tensor([[10, 20, 30, 40, 50]])
    rolled, total = roll_tensor(ids)
    assert rolled.tolist() == [[20, 30, 40, 50, 0]] and total.item() == 140
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 2, 5]))
    assert roll_tensor(ids, packed_seq_params=packed, return_sum=False)[0].tolist() == [[20, 0, 40, 50, 0]]
    assert roll_tensor(None) == (None, None)
    assert get_gpt_mtp_block_spec(config(), get_gpt_layer_local_spec(), use_transformer_engine=True) is None
    with pytest.raises(ConfigError, match="shifts=1"):
        roll_tensor(ids, shifts=1)


def test_a_layer_of_experts_alone() -> None:
    settings = config(num_moe_experts=4, moe_router_topk=2)
    model = gpt(settings, get_gpt_layer_local_spec(4))
    layer = MoELayer(settings, MoESubmodules(), layer_number=2)
    inside = model.decoder.layers["1"].mlp
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    assert list(layer.state_dict()) == list(inside.state_dict())
    assert torch.equal(layer(x)[0], inside(x, SequenceContext())[0])
    layer.set_layer_number(3)
    assert (layer.layer_number, layer.router.layer_number, layer.expert_layers) == (3, 2, [2])


@pytest.mark.parametrize(("tokens", "experts", "k"), [(64, 8, 2), (12, 4, 1)])
def test_quantiles_that_balance_experts(tokens: int, experts: int, k: int) -> None:
    scores, beta = torch.randn(tokens, experts, dtype=torch.float64), torch.randn(experts, dtype=torch.float64)
    chosen, balanced = moe_utils.qb_dual_update(scores, k, beta)
    order = (scores - beta).argsort(1, descending=True)
    assert torch.equal(chosen, order[:, :k])
    highest = (scores - beta).gather(1, order[:, k : k + 1])  # of those that are not chosen
    torch.testing.assert_close(balanced, (scores - highest).sort(0, descending=True).values[tokens * k // experts])
    assert moe_utils.qb_dual_update(scores, k, beta, update_beta=False)[1] is beta
    with pytest.raises(ConfigError, match="5 tokens x k=1 must be divisible by"):
        moe_utils.qb_dual_update(scores[:5], 1, beta)


@pytest.mark.parametrize("alone", [True, False])
def test_masks_of_padding_are_refused_with_quantiles(alone: bool) -> None:
    settings = config(num_moe_experts=4, moe_router_load_balancing_type="quantile_balancing", moe_aux_loss_coeff=0.0)
    padding = torch.zeros_like(IDS, dtype=torch.bool)
    with pytest.raises(ConfigError, match="does not support padding masks"):
        if alone:
            MoELayer(settings)(torch.randn(*IDS.T.shape, 16, dtype=torch.float64), padding_mask=padding)
        else:
            gpt(settings, get_gpt_layer_local_spec(4))(IDS, labels=IDS, padding_mask=padding)


def test_messages_of_a_layer_of_experts_in_8_bits() -> None:
    wire: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}
    wire |= {"use_transformer_engine_op_fuser": True, "moe_grouped_gemm": True}
    narrow = {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8"}
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    tokens, gradients = list[Tensor](), list[Tensor]()

    def note_gradients(module: nn.Module, inputs: Any, outputs: Any) -> None:
        gradients.append(outputs[0])

    for formats in ({}, narrow):
        settings = config(num_moe_experts=4, moe_router_topk=2, **wire, **formats)
        inside = gpt(settings, get_gpt_layer_local_spec(4)).decoder.layers[1].mlp
        layer = MoELayer(settings, MoESubmodules(), layer_number=2)
        layer.experts.register_forward_pre_hook(lambda module, arguments: tokens.append(arguments[0].detach()))
        layer.experts.register_full_backward_hook(note_gradients)
        output = layer(x)[0]
        assert torch.equal(output, inside(x, SequenceContext())[0])
        (output * x).sum().backward()
    for exact, rounded in (tokens, gradients):
        assert torch.equal(rounded, rounded_to_mxfp8(exact)) and not torch.equal(rounded, exact)
    with pytest.raises(ConfigError, match="a model was built with moe_dispatch_fwd_dtype='mxfp8'"):
        settings.moe_dispatch_fwd_dtype = "bf16"
    with pytest.raises(ConfigError, match=r"must be bf16 or mxfp8, not \('fp8', 'bf16'\)"):
        config(num_moe_experts=4, **wire, moe_dispatch_fwd_dtype="fp8")


def test_tensors_for_checkpoints_of_a_callers_own() -> None:
    class Second(LocalGroup):
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    state = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    found = make_sharded_tensors_for_checkpoint(state, "a.", {"weight": 1}, tp_group=Second(), dp_cp_group=LocalGroup())
    split, whole = found["a.weight"], found["a.bias"]
    assert (split.key, split.global_shape, split.global_offset, split.is_main_replica) == (
        "a.weight",
        (3, 4),
        (0, 2),
        True,
    )
    assert (whole.global_shape, whole.is_main_replica) == ((3,), False)
    plain = nn.Linear(2, 3)
    assert set(sharded_state_dict_default(plain, "b.")) == {"b.weight", "b.bias"}
    assert sharded_state_dict_default(Lin(config()), "c.")["c.kept"].key == "c.kept"
    with pytest.raises(ConfigError, match="not supported"):
        make_sharded_tensors_for_checkpoint(state, "a.", sharded_offsets=((0, 1, 2),))


def test_splits_and_losses_under_megatrons_names() -> None:
    x = torch.arange(6.0, requires_grad=True)
    first, rest = te.SplitAlongDim(x.view(1, 6), 1, [1, 5], True)
    assert first.tolist() == [0.0] and rest.shape == (1, 5)
    te.te_checkpoint(lambda t: (t * t).sum(), False, None, None, x).backward()
    assert x.grad.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    with pytest.raises(ConfigError, match="distribute_saved_activations"):
        te.te_checkpoint(lambda t: t, True, None, None, x)
    logits, target = torch.randn(3, 2, 5), torch.tensor([[0, 1], [2, 3], [4, 0]])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    torch.testing.assert_close(fused_vocab_parallel_cross_entropy(logits, target), expected)
    configure_nvtx_profiling(torch.cuda.is_available())
    nvtx_range_push("a", suffix="b")
    nvtx_range_pop("a", suffix="b")
    assert Fp8Recipe("delayed") is Fp8Recipe.delayed


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_of_later_tokens(per_token: bool) -> None:
    """Gradients compared with the formula, with a ragged mask and scaled logits."""
    torch.manual_seed(0)
    weight = torch.randn(11, 4, dtype=torch.float64)
    hidden = torch.randn(3 * 5, 2, 4, dtype=torch.float64, requires_grad=True)
    labels, mask = torch.randint(0, 11, (2, 5)), (torch.rand(2, 5) < 0.7).double()
    config = SimpleNamespace(
        mtp_num_layers=2, mtp_loss_scaling_factor=0.3, calculate_per_token_loss=per_token, mtp_detach_heads=False
    )

    def losses(wanted: Tensor, logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), wanted, reduction="none")

    MTPLossAutoScaler.set_loss_scale(torch.tensor(4.0))
    try:
        main = process_mtp_loss(
            *(hidden, labels, mask, lambda x, **_: (x @ weight.T, None), None, None, True, losses, config),
            scale_logits_fn=lambda x: 0.5 * x,
        )
        main.sum().backward()
    finally:
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    assert torch.equal(main, hidden[:5])
    plain = hidden.detach().requires_grad_()
    total = plain[:5].sum()
    for depth in (1, 2):
        shown = mask[:, depth:]
        own = losses(labels[:, depth:], 0.5 * plain[5 * depth : 5 * depth + 5 - depth] @ weight.T) * shown
        total = total + 4.0 * 0.15 * own.sum() / shown.sum() * (mask.sum() if per_token else 1.0)
    total.backward()
    torch.testing.assert_close(hidden.grad, plain.grad)
