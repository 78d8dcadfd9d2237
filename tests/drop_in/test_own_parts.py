"""A caller's core attention; experts and latent attention alone; losses, rows and positions under Megatron's names."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.datasets.megatron_tokenizer import MegatronLegacyTokenizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.inference.engine_model import generator_of
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import (
    RotaryEmbedding,
    YarnRotaryEmbedding,
    apply_rotary_pos_emb,
    yarn_rotary_pos_embedding,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator, destroy_rerun_state_machine, get_rerun_state_machine
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu, _initialize_affine_weight_gpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron_core import parallel_state
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.verify.ranks import run_ranks
from megatron_core.vocabularies.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from tests.drop_in.test_gpt_model import IDS, LENGTH, MASK, config, gpt
from tests.vocabularies.corpus import write_gpt2_files, write_tokenizer_json

EXPERTS = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 8, "add_bias_linear": False}


class Softmax(nn.Module):
    """Attention as a user writes it, with a weight of its own."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str) -> None:
        super().__init__()
        assert (attn_mask_type, attention_type) == (AttnMaskType.causal, "self")
        assert 1 <= layer_number <= config.num_layers
        self.temperature = nn.Parameter(torch.ones(1, dtype=config.params_dtype))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: AttnMaskType
    ) -> Tensor:
        repeats = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(query.shape[-1]) * self.temperature
        if attn_mask_type == AttnMaskType.causal:
            attention_mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(attention_mask, -torch.inf).softmax(-1)  # type: ignore[arg-type]
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def with_core(core: type) -> ModuleSpec:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core
    return spec


@pytest.mark.parametrize("masked", [False, True])
def test_a_callers_core_attention_is_used(masked: bool) -> None:
    settings = config(num_query_groups=2)
    mask = MASK.clone() if masked else None
    if mask is not None:
        mask[..., :3, :3] = False  # the first tokens see one another
    own, ours = gpt(settings, with_core(Softmax)), gpt(settings)
    losses = [model(IDS, None, mask, labels=IDS).mean() for model in (own, ours)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    for loss in losses:
        loss.backward()
    expected = {name: parameter.grad for name, parameter in ours.named_parameters()}
    found = {name: parameter.grad for name, parameter in own.named_parameters()}
    assert len(found) == len(expected) + 2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)
    with torch.no_grad():
        own.decoder.layers[1].self_attention.core_attention.module.temperature.fill_(0.5)
    assert not torch.equal(own(IDS, None, mask, labels=IDS).mean(), losses[1])


def test_weights_of_a_core_attention_over_ranks() -> None:
    """Each rank computes its own heads: the gradient is a sum over ranks."""
    expected = _gradient_of_temperature(1)
    for found in run_ranks(2, _gradient_of_temperature, 2):
        assert found == pytest.approx(expected, rel=1e-9)
    assert min(map(abs, expected)) > 0


def _gradient_of_temperature(ranks: int) -> list[float]:
    settings = config(tensor_model_parallel_size=ranks)
    if ranks > 1:
        parallel_state.initialize_model_parallel(ranks)
    model: Any = DistributedDataParallel(settings, DistributedDataParallelConfig(), gpt(settings, with_core(Softmax)))
    model(IDS, labels=IDS).mean().backward()
    finalize_model_grads([model])
    found = [parameter.main_grad for name, parameter in model.named_parameters() if "temperature" in name]
    return [gradient.item() for gradient in found]


def test_core_attention_of_attention_alone_and_its_limits() -> None:
    model_parallel_cuda_manual_seed(7)
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    made = [
        SelfAttention(config(), SelfAttentionSubmodules(core_attention=core), 1, AttnMaskType.causal)
        for core in (Softmax, None)
    ]
    torch.testing.assert_close(made[0](x)[0], made[1](x)[0], rtol=0, atol=1e-12)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 12, 20, 24]))
    with pytest.raises(ConfigError, match="packed documents are not supported by a core_attention"):
        gpt(spec=with_core(Softmax))(IDS, packed_seq_params=packed)
    with pytest.raises(ConfigError, match="generation does not support core_attention of your own"):
        generator_of(gpt(spec=with_core(Softmax)))
    with pytest.raises(ConfigError, match=r"core_attention=.*Softmax.* does not support softmax_scale=0.5"):
        gpt(config(softmax_scale=0.5), with_core(Softmax))


def test_experts_alone() -> None:
    settings = config(**EXPERTS)
    model = gpt(settings, get_gpt_layer_local_spec(num_experts=4))
    inside: Any = model.decoder.layers[0].mlp
    assert isinstance(inside.experts, TEGroupedMLP) and inside.experts.num_local_experts == 4
    alone = SequentialMLP(4, settings, MLPSubmodules())
    alone.load_state_dict(inside.experts.state_dict())
    x = torch.randn(9, 16, dtype=torch.float64)
    probs, counts = torch.rand(9, dtype=torch.float64), torch.tensor([3, 0, 5, 1])
    found, bias = alone(x, counts, probs)
    assert bias is None
    expert = torch.arange(4).repeat_interleave(counts)
    first, second = inside.experts.linear_fc1.weight, inside.experts.linear_fc2.weight
    for row in range(9):
        inner = nn.functional.gelu(first[expert[row]] @ x[row])
        torch.testing.assert_close(found[row], probs[row] * (second[expert[row]] @ inner), rtol=0, atol=1e-12)
    shared = SharedExpertMLP(settings, MLPSubmodules(), gate=False)
    shared.load_state_dict(inside.shared_experts.state_dict())
    assert isinstance(inside.shared_experts, SharedExpertMLP)
    weights: list[Any] = [inside.shared_experts.linear_fc1.weight, inside.shared_experts.linear_fc2.weight]
    expected = nn.functional.gelu(x[:, None] @ weights[0].T) @ weights[1].T
    torch.testing.assert_close(shared(x[:, None]), expected, rtol=0, atol=1e-12)
    with pytest.raises(LayoutError, match="num_local_experts=3, but num_moe_experts=4"):
        TEGroupedMLP(3, settings)
    with pytest.raises(ConfigError, match="gate=True with moe_shared_expert_gate=False"):
        SharedExpertMLP(settings, None, gate=True)
    with pytest.raises(ConfigError, match="set moe_token_dispatcher_type, and build a MoELayer"):
        MoEAlltoAllTokenDispatcher(4, [0, 1, 2, 3], settings)


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
def test_latent_attention_alone(rope_type: str) -> None:
    settings = MLATransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        params_dtype=torch.float64,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        rope_type=rope_type,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = gpt(settings, position_embedding_type="rope")
    inside = model.decoder.layers[1].self_attention
    seen: dict[str, Tensor] = {}
    inside.register_forward_hook(lambda module, given, result: seen.update(x=given[0], y=result[0]))
    model(IDS)
    alone = MLASelfAttention(settings, None, 2)
    assert isinstance(inside, MLASelfAttention)
    assert torch.equal(alone(seen["x"])[0], seen["y"])
    positions = torch.arange(LENGTH).expand(2, -1) + 3
    torch.testing.assert_close(alone(seen["x"], position_ids=positions)[0], seen["y"], rtol=0, atol=1e-9)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention = MLASelfAttention
    assert torch.equal(gpt(settings, spec, position_embedding_type="rope")(IDS), model(IDS))
    with pytest.raises(ConfigError, match=r"layer 0: the specification has .*MLASelfAttention"):
        gpt(spec=spec)
    with pytest.raises(ConfigError, match="multi_latent_attention=False"):
        MLASelfAttention(config())


def test_rows_by_expert_and_back() -> None:
    x, probs = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    chosen = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]], dtype=torch.bool)
    rows, weights, tokens, _, _ = permute(x, chosen, probs, num_out_tokens=7)
    assert tokens.tolist() == [0, 3, 3, 0, 1, 4, 1]
    assert torch.equal(rows, x[tokens]) and weights is not None
    assert torch.equal(weights, probs[tokens, torch.tensor([0, 0, 1, 2, 2, 2, 3])])
    expected = x * (probs * chosen).sum(1, keepdim=True)
    torch.testing.assert_close(unpermute(rows, tokens, x.shape, probs, chosen), expected)
    torch.testing.assert_close(unpermute(rows * weights[:, None], tokens, x.shape), expected)
    chunks, sorted_probs = sort_chunks_by_idxs(rows, torch.tensor([2, 1, 3, 1]), torch.tensor([2, 0, 3, 1]), weights)
    order = [3, 4, 5, 0, 1, 6, 2]
    assert torch.equal(chunks, rows[order]) and sorted_probs is not None and torch.equal(sorted_probs, weights[order])
    with pytest.raises(ConfigError, match="drop_and_pad=True is not supported"):
        permute(x, chosen, drop_and_pad=True)


def test_losses_of_later_tokens_are_tracked() -> None:
    settings = config(mtp_num_layers=2)
    model = gpt(settings, mtp_block_spec=get_gpt_mtp_block_spec(settings, get_gpt_layer_local_spec(), False))
    MTPLossLoggingHelper.tracker.clear()
    expected = torch.zeros(2)
    for ids in (IDS, IDS.flip(0) + 1):
        model(ids % 48, labels=ids % 48)
        losses = model.auxiliary_losses
        assert losses is not None
        expected += torch.tensor(list(losses.means(losses.totals(ids.device, owns_loss=True).tolist()).values()))
    assert expected.min() > 1
    torch.testing.assert_close(MTPLossLoggingHelper.tracker["values"], expected)
    found: dict[str, Any] = {}
    MTPLossLoggingHelper.track_mtp_metrics(0.5, 1, None, None, found)
    torch.testing.assert_close(torch.stack([found["mtp_1 loss"], found["mtp_2 loss"]]), expected / 2)
    assert MTPLossLoggingHelper.tracker["values"].tolist() == [0, 0]
    model.eval()
    model(IDS, labels=IDS)
    assert MTPLossLoggingHelper.tracker["values"].tolist() == [0, 0]


def test_positions_with_yarn() -> None:
    """The fastest channel keeps its frequency, the slowest is divided by the factor (Peng et al. 2023)."""
    plain = RotaryEmbedding(64, 1.0)(8)
    angles, magnitude = YarnRotaryEmbedding(64, scaling_factor=4.0, original_max_position_embeddings=2048)(8)
    assert angles.shape == plain.shape == (8, 1, 1, 64)
    torch.testing.assert_close(angles[..., 0], plain[..., 0])
    torch.testing.assert_close(angles[..., 31], plain[..., 31] / 4.0)
    assert magnitude == yarn_rotary_pos_embedding._yarn_get_mscale(4.0) == 1 + 0.1 * math.log(4.0)


@pytest.mark.parametrize(("interleaved", "separated"), [(False, False), (True, False), (False, True)])
def test_rotary_positions_of_documents(interleaved: bool, separated: bool) -> None:
    settings = config(rotary_interleaved=interleaved)
    rotary = RotaryEmbedding(8, 1.0, interleaved)
    x, borders = torch.randn(9, 2, 8, dtype=torch.float64), torch.tensor([0, 4, 5, 9])
    found = apply_rotary_pos_emb(x, rotary(4), settings, borders, mla_rotary_interleaved=separated)
    for start, stop in pairwise(borders.tolist()):
        given = x[start:stop, None]
        if separated:
            given = torch.cat([given[..., ::2], given[..., 1::2]], dim=-1)
        expected = apply_rotary_pos_emb(given, rotary(stop - start), settings)
        torch.testing.assert_close(found[start:stop], expected.squeeze(1))
    whole = apply_rotary_pos_emb(x, rotary(9), settings, borders)
    torch.testing.assert_close(whole, apply_rotary_pos_emb(x[:, None], rotary(9), settings).squeeze(1))


@pytest.mark.parametrize("max_seqlen", [None, 8])
def test_rotary_positions_of_documents_split_over_ranks(max_seqlen: int | None) -> None:
    """Rank r of 2 has the quarters r and 3 - r of each document; padding counts as a part of the last document."""
    settings, rotary = config(), RotaryEmbedding(8, 1.0)
    borders, x = torch.tensor([0, 4, 12]), torch.randn(7, 2, 8, dtype=torch.float64)
    in_documents = {0: [0, 3, 0, 1, 6, 7], 1: [1, 2, 2, 3, 4, 5]}
    starts = torch.tensor([0, 0, 4, 4, 4, 4])
    for rank, positions in in_documents.items():
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        found = apply_rotary_pos_emb(x, rotary(8), settings, borders, cp_group=group, max_seqlen=max_seqlen)
        angles = rotary(8)[torch.tensor(positions)]
        torch.testing.assert_close(found[:6, None], apply_rotary_pos_emb(x[:6, None], angles, settings))
        # Angles for all 12 tokens continue from one document to the next.
        found = apply_rotary_pos_emb(x, rotary(12), settings, borders, cp_group=group, max_seqlen=max_seqlen)
        angles = rotary(12)[torch.tensor(positions) + starts]
        torch.testing.assert_close(found[:6, None], apply_rotary_pos_emb(x[:6, None], angles, settings))


def test_tables_of_rotary_positions() -> None:
    rotary = RotaryEmbedding(8, 1.0)
    torch.testing.assert_close(rotary.inv_freq, 10000.0 ** -(torch.arange(0, 8, 2) / 8))
    cos, sin = rotary.get_cos_sin(3, 5)
    angles = torch.arange(5, 8)[:, None] * rotary.frequencies
    torch.testing.assert_close((cos, sin), (angles.cos(), angles.sin()))
    x, block = torch.empty(6, 1, 16), SimpleNamespace(input_tensor=None)
    parallel = SimpleNamespace(sequence_parallel=True, tensor_model_parallel_size=2, context_parallel_size=4)
    assert rotary.get_rotary_seq_len(None, block, x, parallel) == 48
    assert rotary.get_rotary_seq_len(None, SimpleNamespace(input_tensor=x[:3]), x, config()) == 3
    packed = PackedSeqParams(max_seqlen_q=5, max_seqlen_kv=7)
    assert rotary.get_rotary_seq_len(None, block, x, config(), packed) == 7
    with pytest.raises(ConfigError, match="generate with the engines"):
        rotary.get_rotary_seq_len(object(), block, x, config())


@pytest.mark.parametrize("provider", [TESpecProvider(), LocalSpecProvider()])
def test_a_specification_from_a_provider(provider: LocalSpecProvider) -> None:
    fused = provider.fuse_layernorm_and_linear()
    first = provider.column_parallel_layer_norm_linear() if fused else provider.column_parallel_linear()
    norm = IdentityOp if fused else provider.layer_norm()
    attention = SelfAttentionSubmodules(first, provider.core_attention(), provider.row_parallel_linear())
    mlp = MLPSubmodules(first, provider.row_parallel_linear(), provider.activation_func())
    spec = ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(SelfAttention, submodules=attention),
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(MLP, submodules=mlp),
        ),
    )
    assert torch.equal(gpt(spec=spec)(IDS), gpt()(IDS))
    spec.submodules.pre_mlp_layernorm = provider.layer_norm()
    spec.submodules.mlp = get_moe_module_spec_for_backend(provider, num_experts=4)
    model = gpt(config(**EXPERTS), spec)
    assert torch.equal(model(IDS), gpt(config(**EXPERTS), get_gpt_layer_local_spec(num_experts=4))(IDS))
    assert provider.grouped_mlp_modules(True)(4, config(**EXPERTS)).num_local_experts == 4


def test_weights_of_a_callers_own_projection() -> None:
    """Each rank has its part of each of two fused matrices."""
    run_ranks(2, _draw_projection)


def _draw_projection() -> None:
    parallel_state.initialize_model_parallel(2)
    weight: Any = torch.empty(4, 3)
    count = partial(torch.arange, 24, out=torch.empty(0))
    whole = _initialize_affine_weight_cpu(
        weight,
        8,
        3,
        4,
        0,
        lambda w: w.copy_(count().view(8, 3)),
        stride=2,
        return_master_weight=True,
        rank=1,
        world_size=2,
    )
    assert whole is not None and torch.equal(weight, whole[[2, 3, 6, 7]])
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 2)
    model_parallel_cuda_manual_seed(3)
    first, second = torch.empty(4, 3), torch.empty(4, 3)
    _initialize_affine_weight_gpu(first, nn.init.normal_, partition_dim=1)
    _initialize_affine_weight_gpu(second, nn.init.normal_, partition_dim=1)
    assert not torch.equal(first, second)


def test_small_names() -> None:
    class Letters(MegatronLegacyTokenizer):
        vocab = property(lambda self: {"a": 0})
        inv_vocab = property(lambda self: {0: "a"})
        vocab_size = property(lambda self: 1)

        def tokenize(self, text: str) -> list[int]:
            return [0] * len(text)

    tokenizer: Any = Letters("folder", extra=3)
    assert tokenizer.unique_identifiers == {"class": "Letters", "tokenizer_path": ["folder"], "extra": "3"}
    with pytest.raises(NotImplementedError, match="Letters has no attribute 'eod'"):
        _ = tokenizer.eod
    items = RerunDataIterator(iter([1, 2]))
    assert [*items] == [1, 2]
    with pytest.raises(ConfigError, match=r"pretrain_gpt\.py repeats steps with --rerun-mode"):
        items.rewind()
    assert ensure_metadata_has_dp_cp_group(None)["dp_cp_group"].size() == 1
    assert ensure_metadata_has_dp_cp_group({"dp_cp_group": 3, "a": 1}) == {"dp_cp_group": 3, "a": 1}
    before = get_rerun_state_machine()
    destroy_rerun_state_machine()
    assert get_rerun_state_machine() is not before


def test_tokenizers_have_megatrons_names(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": "<|endoftext|>", "chat_template": "{% for m in messages %}{{ m.content }}|{% endfor %}"}
        )
    )
    tokenizer = MegatronTokenizer.from_pretrained(str(tmp_path), {"library": "huggingface"})
    ids = tokenizer.tokenize("some words")
    assert tokenizer.eos_id is not None
    assert isinstance(tokenizer.engine, HuggingFaceTokenizer) and isinstance(tokenizer, Tokenizer)
    assert ids == tokenizer.engine.tokenize("some words") and tokenizer.vocab_size == tokenizer.engine.vocab_size
    assert tokenizer.eos_id == tokenizer.eos == tokenizer.eod and tokenizer.bos_id is tokenizer.pad_id is None
    assert tokenizer.detokenize([*ids, tokenizer.eos_id]) == "some words<|endoftext|>"
    assert tokenizer.detokenize([*ids, tokenizer.eos_id], skip_special_tokens=True) == "some words"
    messages = [{"role": "user", "content": "some"}, {"role": "assistant", "content": "words"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "some|words|"
    assert tokenizer.apply_chat_template(messages) == tokenizer.tokenize("some|words|")
    other = "{{ messages[1].role }}"
    assert tokenizer.apply_chat_template(messages, other, tokenize=False) == "assistant"
    with_own = MegatronTokenizer.from_pretrained(str(path), {"library": "huggingface", "chat_template": other})
    assert with_own.apply_chat_template(messages, tokenize=False) == "assistant"
    assert tokenizer.unique_identifiers["fingerprint"] == with_own.fingerprint()
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merges_file": str(tmp_path / "merges.txt")}
    write_gpt2_files(tmp_path)
    gpt2 = MegatronTokenizer.from_pretrained("GPT2BPETokenizer", {"library": "megatron"}, **files)
    assert isinstance(gpt2.engine, GPT2BPETokenizer) and gpt2.detokenize(gpt2.tokenize("some words")) == "some words"
    with pytest.raises(ConfigError, match="additional_special_tokens is not supported; store special tokens in"):
        MegatronTokenizer.from_pretrained(str(tmp_path), {"library": "huggingface"}, additional_special_tokens=["a"])
    plain = build_tokenizer(
        Namespace(
            tokenizer_type="NullTokenizer", vocab_size=9, make_vocab_size_divisible_by=8, tensor_model_parallel_size=1
        )
    )
    assert (plain.library, plain.tokenize("1 3")) == ("null-text", [1, 3])
    with pytest.raises(ConfigError, match="has no chat template; pass chat_template="):
        plain.apply_chat_template(messages)
    with pytest.raises(AttributeError):
        _ = plain.missing
