"""Our models equal the published ones: with the same weights, `transformers` gives the same losses and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.models import GPTModel
from megatron_core.tensor_parallel import ModelParallelConfig

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH = 3, 32, 4, 97, 24
EXACT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _ours(**settings: object) -> GPTModel:
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        init_method_std=0.2,
        **EXACT,
        **settings,
    )
    return GPTModel(config, VOCABULARY, LENGTH, parallel=ModelParallelConfig(params_dtype=torch.float64))


def _fuse(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Rows of three projections in the order of one fused matrix: per group queries, key, value."""
    parts = [x.unflatten(0, (groups, -1)) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _compare(ours: GPTModel, theirs: torch.nn.Module, pairs: dict[str, Tensor], tolerance: float) -> None:
    """Copy ``pairs`` (our names, their values) into our model; loss and logits must then agree, and both get
    gradients."""
    parameters = dict(ours.named_global_parameters())
    assert set(pairs) == set(parameters)
    with torch.no_grad():
        for name, value in pairs.items():
            parameters[name][: value.shape[0]].copy_(value)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loss = ours(ids[:, :-1], labels=ids[:, 1:]).mean()
    logits = theirs(input_ids=ids[:, :-1]).logits
    # Not their own loss: it is computed in float32 whatever the model's dtype.
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(ours(ids[:, :-1]), logits, rtol=tolerance, atol=tolerance * logits.abs().max().item())
    loss.backward()
    expected.backward()


def test_gpt2() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    tolerance = 1e-11
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).double()
    body = theirs.transformer
    ours = _ours(openai_gelu=True)

    def pairs(of) -> dict[str, Tensor]:
        found = {
            "embedding.word_embeddings.weight": of(body.wte.weight),
            "embedding.position_embeddings.weight": of(body.wpe.weight),
            "decoder.final_layernorm.weight": of(body.ln_f.weight),
            "decoder.final_layernorm.bias": of(body.ln_f.bias),
        }
        for n, block in enumerate(body.h):
            layer = f"decoder.layers.{n}."
            for kind, parameter in (("weight", "weight"), ("bias", "bias")):
                # GPT-2 stores its matrices transposed.
                turn = (lambda x: of(x).t()) if kind == "weight" else of
                found |= {
                    f"{layer}input_layernorm.{kind}": of(getattr(block.ln_1, parameter)),
                    f"{layer}pre_mlp_layernorm.{kind}": of(getattr(block.ln_2, parameter)),
                    f"{layer}self_attention.linear_qkv.{kind}": _fuse(
                        *turn(getattr(block.attn.c_attn, parameter)).chunk(3), HEADS
                    ),
                    f"{layer}self_attention.linear_proj.{kind}": turn(getattr(block.attn.c_proj, parameter)),
                    f"{layer}mlp.linear_fc1.{kind}": turn(getattr(block.mlp.c_fc, parameter)),
                    f"{layer}mlp.linear_fc2.{kind}": turn(getattr(block.mlp.c_proj, parameter)),
                }
        return found

    _compare(ours, theirs, pairs(lambda x: x.detach()), tolerance)
    _same_gradients(ours, pairs(lambda x: x.grad), tolerance)


@pytest.mark.parametrize(("groups", "window"), [(4, None), (2, None), (1, None), (2, 6), (2, 13)])
def test_llama(groups: int, window: int | None) -> None:
    """Also Mistral, which adds a window: of 6 keys through blocks of queries, of 13 through a mask."""
    model = "Llama" if window is None else "Mistral"
    own = {} if window is None else {"sliding_window": window, "attn_implementation": "eager"}
    config = getattr(transformers, f"{model}Config")(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=groups, max_position_embeddings=LENGTH, rms_norm_eps=1e-5,
        tie_word_embeddings=False, **own,
    )  # fmt: skip
    # Their norms and rotary tables are float32 in a float64 model, too: agreement is limited to its epsilon, 1.2e-7.
    tolerance = 2e-6
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{model}ForCausalLM")(config).double()
    ours = _ours(
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        ffn_hidden_size=48,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        group_query_attention=groups < HEADS,
        num_query_groups=groups if groups < HEADS else None,
        window_size=None if window is None else (window - 1, 0),
    )

    _compare(ours, theirs, _llama_pairs(theirs, groups, Tensor.detach), tolerance)
    _same_gradients(ours, _llama_pairs(theirs, groups, lambda x: x.grad), tolerance)


def test_glm() -> None:
    """Pairs of adjacent channels are rotated, for half the channels of a head; two query heads share a key and
    value."""
    groups = 2
    config = transformers.GlmConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, head_dim=8,
        num_attention_heads=HEADS, num_key_value_heads=groups, max_position_embeddings=LENGTH, rms_norm_eps=1e-5,
        tie_word_embeddings=False, attention_bias=False, attention_dropout=0.0, pad_token_id=0,
    )  # fmt: skip
    tolerance = 2e-6  # as Llama's
    torch.manual_seed(0)
    theirs = transformers.GlmForCausalLM(config).double()
    ours = _ours(
        position_embedding_type="rope",
        rotary_interleaved=True,
        rotary_percent=0.5,
        normalization="RMSNorm",
        swiglu=True,
        ffn_hidden_size=48,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        group_query_attention=True,
        num_query_groups=groups,
    )
    _compare(ours, theirs, _llama_pairs(theirs, groups, Tensor.detach), tolerance)
    _same_gradients(ours, _llama_pairs(theirs, groups, lambda x: x.grad), tolerance)


def _llama_pairs(theirs: torch.nn.Module, groups: int, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """``of`` each weight of a model structured like Llama, by our names."""
    found = {
        "embedding.word_embeddings.weight": of(theirs.model.embed_tokens.weight),
        "decoder.final_layernorm.weight": of(theirs.model.norm.weight),
        "output_layer.weight": of(theirs.lm_head.weight),
    }
    for n, block in enumerate(theirs.model.layers):
        layer, attention, mlp = f"decoder.layers.{n}.", block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate_and_value = (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)
        found |= {
            f"{layer}input_layernorm.weight": of(block.input_layernorm.weight),
            f"{layer}pre_mlp_layernorm.weight": of(block.post_attention_layernorm.weight),
            f"{layer}self_attention.linear_qkv.weight": _fuse(*(of(p.weight) for p in projections), groups),
            f"{layer}self_attention.linear_proj.weight": of(attention.o_proj.weight),
            f"{layer}mlp.linear_fc1.weight": torch.cat([of(p.weight) for p in gate_and_value]),
            f"{layer}mlp.linear_fc2.weight": of(mlp.down_proj.weight),
        }
    return found


def _same_gradients(ours: GPTModel, expected: dict[str, Tensor], tolerance: float) -> None:
    for name, parameter in ours.named_global_parameters():
        if not parameter.requires_grad:
            continue
        wanted = expected[name]
        found = parameter.grad[: wanted.shape[0]]
        scale = wanted.abs().max().clamp_min(1e-6)
        assert ((found - wanted).abs().max() / scale) < 10 * tolerance, name
        assert not parameter.grad[wanted.shape[0] :].any(), f"{name}: padding has a gradient"
