"""Sparse attention against the equations of DeepSeek-V3.2, computed query by query, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.config.rules_single import unread_settings
from megatron_core.features.sparse_attention.attention import SparseLatentAttention
from megatron_core.features.sparse_attention.settings import INDEXER_LOSS
from megatron_core.models import GPTModel
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.training.step import train_step
from megatron_core.transformer import LayerContext, SequenceContext
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses
from megatron_core.transformer.context import PackedDocuments
from megatron_core.transformer.layer_spec import layer_spec
from tests.parity.sparse_rows import DSA
from tests.runs import tiny_config, tiny_run

LENGTH, BATCH, TOPK = 11, 2, 4
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "dsa_indexer_topk": TOPK, "dsa_indexer_n_heads": 3}


def layer_of(**settings: Any) -> Any:
    config = tiny_config(**DSA | SIZES | settings).model
    context = LayerContext(config, ModelParallelConfig(params_dtype=torch.float64), LocalGroup(), 1)
    layer = layer_spec(config, 0).self_attention(context, 0)
    torch.manual_seed(5)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.train()


def rotary() -> tuple[Tensor, Tensor]:
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    return angles.cos(), angles.sin()


def pairs_of(x: Tensor, *, interleaved: bool) -> list[tuple[int, int]]:
    count = x.shape[-1] // 2
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + count) for i in range(count)]


def rotated(x: Tensor, at: int, *, interleaved: bool) -> Tensor:
    """``x`` ``[..., 4]`` at the position ``at``."""
    (cos, sin), out = rotary(), x.clone()
    for i, (a, b) in enumerate(pairs_of(x, interleaved=interleaved)):
        out[..., a] = x[..., a] * cos[at, 0, i] - x[..., b] * sin[at, 0, i]
        out[..., b] = x[..., b] * cos[at, 0, i] + x[..., a] * sin[at, 0, i]
    return out


def test_an_evaluation_attends_to_all_keys_in_the_warm_up() -> None:
    """So that no note says that the setting has no effect with --skip-train."""
    evaluated = tiny_config(**DSA | SIZES | {"dsa_indexer_warmup": True, "skip_train": True, "train_iters": None})
    assert "dsa_indexer_warmup" not in unread_settings(evaluated)
    torch.manual_seed(7)
    hidden = torch.randn(LENGTH, BATCH, SIZES["hidden_size"], dtype=torch.float64)
    warm, whole, sparse = (
        layer_of(**settings).eval()(hidden, SequenceContext(rotary=rotary()))[0]
        for settings in ({"dsa_indexer_warmup": True}, {"dsa_indexer_topk": LENGTH}, {})
    )
    torch.testing.assert_close(warm, whole, rtol=0, atol=1e-12)
    assert not torch.allclose(warm, sparse)


def by_equations(
    layer: SparseLatentAttention, hidden: Tensor, *, sparse: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """The output ``[s, h]`` and the sum of the losses for one sequence ``[s, h]``; the loss has only the indexer's
    gradients."""
    indexer, turned = layer.core_attention.indexer, 4
    q_latent, latents = layer.q_layernorm(layer.linear_q_down_proj(hidden)), layer.linear_kv_down_proj(hidden)
    latent, shared = layer.kv_layernorm(latents[:, : layer.rank]), latents[:, layer.rank :]
    queries = (q_latent @ layer.linear_q_up_proj.weight.T).unflatten(-1, (2, -1))
    plain, value = (latent @ layer.linear_kv_up_proj.weight.T).unflatten(-1, (2, -1)).split([6, 10], dim=-1)

    def of_index(x: Tensor, at: int) -> Tensor:
        return torch.cat([rotated(x[..., :turned], at, interleaved=interleaved), x[..., turned:]], dim=-1)

    x, c = hidden.detach(), q_latent.detach()
    index_q = (c @ indexer.linear_wq_b.weight.T).unflatten(-1, (3, -1))
    norm = torch.nn.functional.layer_norm(
        x @ indexer.linear_wk.weight.T, (6,), indexer.k_norm.weight, indexer.k_norm.bias, indexer.k_norm.epsilon
    )
    weights, outputs, loss = x @ indexer.linear_weights_proj.weight.T, [], torch.zeros((), dtype=torch.float64)
    for s in range(len(hidden)):
        query = torch.cat([queries[s, :, :6], rotated(queries[s, :, 6:], s, interleaved=True)], dim=-1)
        scores = (
            torch.stack(
                [
                    sum(weights[s, h] * torch.relu(of_index(index_q[s, h], s) @ of_index(norm[t], t)) for h in range(3))
                    for t in range(s + 1)
                ]
            )
            / (3 * 6) ** 0.5
        )
        ranked = sorted(range(s + 1), key=lambda t: (-scores[t].item(), t))
        chosen, heads, target = sorted(ranked[:TOPK]), [], torch.zeros(s + 1, dtype=torch.float64)
        for head in range(2):
            keys = torch.stack(
                [torch.cat([plain[t, head], rotated(shared[t], t, interleaved=True)]) for t in range(s + 1)]
            )
            products = keys @ query[head] / 10**0.5
            heads.append(products[chosen].softmax(0) @ value[chosen, head])
            seen = chosen if sparse else list(range(s + 1))
            target[seen] += products[seen].softmax(0).detach() / 2
        seen = chosen if sparse else list(range(s + 1))
        loss = loss + (target[seen] * (target[seen].log() - scores[seen].log_softmax(0))).sum()
        outputs.append(torch.cat(heads))
    return torch.stack(outputs) @ layer.linear_proj.weight.T, loss


@pytest.mark.parametrize("sparse", [False, True], ids=["dense loss", "sparse loss"])
def test_layer_and_loss_are_the_equations(sparse: bool) -> None:
    """Outputs and all gradients: those of the output for the layer, those of the loss for the indexer alone."""
    settings = {"dsa_indexer_use_sparse_loss": sparse, "dsa_indexer_rope_interleaved": sparse}
    layer = layer_of(**settings, disable_bias_linear=True, normalization="RMSNorm", dsa_indexer_k_norm_epsilon=1e-3)
    hidden = torch.randn(LENGTH, BATCH, 16, dtype=torch.float64, requires_grad=True)
    direction, counted = torch.randn(LENGTH, BATCH, 16, dtype=torch.float64), torch.ones(LENGTH, BATCH)
    counted[3, 1] = 0
    losses = AuxiliaryLosses((INDEXER_LOSS,), sequences=BATCH, tokens=torch.tensor(7.0, dtype=torch.float64))
    context = SequenceContext(
        rotary=rotary(), token_mask=counted, auxiliary_losses=losses.of_micro_batch(0), positions=torch.arange(LENGTH)
    )
    out, _ = layer(hidden, context)
    (out * direction).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()} | {"x": hidden.grad.clone()}
    layer.zero_grad()
    hidden.grad = None
    wanted, total = [], torch.zeros((), dtype=torch.float64)
    for b in range(BATCH):
        own, loss = by_equations(layer, hidden[:, b], sparse=sparse, interleaved=sparse)
        wanted.append(own)
        total = total + loss
        if b == 1:  # the token that does not count: the loss of the prefixes differs by its term
            until = [by_equations(layer, hidden[:stop, b], sparse=sparse, interleaved=sparse)[1] for stop in (3, 4)]
            total = total - (until[1] - until[0])
    torch.testing.assert_close(out, torch.stack(wanted, dim=1), rtol=1e-11, atol=1e-12)
    ((torch.stack(wanted, dim=1) * direction).sum() + 0.7 / 7.0 * total).backward()
    for name, parameter in [*layer.named_parameters(), ("x", hidden)]:
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)
    value, _, _ = losses.totals(torch.device("cpu"), owns_loss=True).tolist()
    assert value == pytest.approx(total.item(), rel=1e-12)


def test_all_keys_are_latent_attention_and_untrained_indexers_have_no_gradient() -> None:
    settings = {"dsa_indexer_topk": LENGTH, "dsa_indexer_loss_coeff": 0.0}
    sparse, plain = layer_of(**settings), layer_of(**settings, experimental_attention_variant=None)
    hidden = torch.randn(LENGTH, BATCH, 16, dtype=torch.float64)
    plain.load_state_dict({name: x for name, x in sparse.state_dict().items() if "indexer" not in name})
    found, wanted = (layer(hidden, SequenceContext(rotary=rotary()))[0] for layer in (sparse, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    assert not any(parameter.requires_grad for parameter in sparse.core_attention.indexer.parameters())


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_a_document_is_what_it_is_alone(backend: str) -> None:
    layer = layer_of(dsa_indexer_topk=2, attention_backend=backend).eval()
    hidden = torch.randn(LENGTH, 1, 16, dtype=torch.float64)
    documents = PackedDocuments.of([[4, 7]], 1, LENGTH, hidden.device)
    with torch.no_grad():
        packed, _ = layer(hidden, SequenceContext(rotary=rotary(), documents=documents))
        cos, sin = rotary()
        for run in (slice(0, 4), slice(4, 11)):
            alone, _ = layer(hidden[run], SequenceContext(rotary=(cos[run], sin[run])))
            torch.testing.assert_close(packed[run], alone, rtol=1e-12, atol=1e-13)
            hides = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            hides[4:, :4] = True
        masked, _ = layer(hidden, SequenceContext(rotary=rotary(), attention_mask=hides[None, None]))
    torch.testing.assert_close(masked, packed, rtol=1e-12, atol=1e-13)


def test_a_model_outside_of_training_has_no_loss_to_lose() -> None:
    config = tiny_config(**DSA | SIZES).model
    model = GPTModel(config, 61, 16)
    tokens = torch.arange(8)[None]
    assert model.eval()(tokens).requires_grad
    with pytest.raises(Exception, match="adds the auxiliary loss 'indexer_loss'"):
        model.train()(tokens)


def test_warmup_trains_only_indexers_and_attends_to_all_keys() -> None:
    """The first loss is that of latent attention; the indexers follow its weights."""
    settings = DSA | SIZES | {"fp64": True, "lr": 1e-2, "lr_decay_style": "constant"}
    run = tiny_run(**settings, dsa_indexer_warmup=True)
    (stage,) = run.stages.values()
    before = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
    results = [train_step(run) for _ in range(6)]
    moved = {name for name, parameter in stage.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if ".indexer." in name}
    plain = {name: value for name, value in settings.items() if "dsa" not in name and name != "cp_comm_type"}
    plain_run = tiny_run(**plain | {"experimental_attention_variant": None})
    assert train_step(plain_run).loss == pytest.approx(results[0].loss, rel=1e-12)
    losses = [result.auxiliary_losses["indexer_loss"] for result in results]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_memory_for_backward_is_linear_in_the_tokens(backend: str) -> None:
    layer, sizes = layer_of(attention_backend=backend), []
    for length in (256, 512):
        saved: dict[int, Tensor] = {}
        losses = AuxiliaryLosses((INDEXER_LOSS,), sequences=1, tokens=torch.tensor(length, dtype=torch.float64))
        angles = torch.arange(length, dtype=torch.float64)[:, None, None] * torch.ones(2, dtype=torch.float64)
        hidden = torch.ones(length, 1, 16, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
        ):
            layer(
                hidden,
                SequenceContext(
                    rotary=(angles.cos(), angles.sin()),
                    auxiliary_losses=losses.of_micro_batch(0),
                    positions=torch.arange(length),
                ),
            )
        for parameter in layer.parameters():
            saved.pop(parameter.untyped_storage().data_ptr(), None)
        sizes.append(sum(each.untyped_storage().nbytes() for each in saved.values()))
    assert 0 < sizes[1] <= 2 * sizes[0]
