"""``HybridModel`` is the engine's model with a pattern of layers."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_core import parallel_state
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.models.gpt import model as own
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.test_gpt_model import IDS, LENGTH, MASK, VOCABULARY, config

PATTERN = "M*-E"
SIZES = {"num_layers": 4, "num_moe_experts": 4, "mamba_num_groups": 2, "mamba_head_dim": 8, "mamba_state_dim": 4}


def settings(**more: Any) -> TransformerConfig:
    return config(**SIZES, is_hybrid_model=True, **more)


def hybrid(own_config: TransformerConfig | None = None, **given: Any) -> HybridModel:
    model_parallel_cuda_manual_seed(7)
    pattern = {"hybrid_layer_pattern": PATTERN} | given
    return HybridModel(own_config or settings(), hybrid_stack_spec, VOCABULARY, LENGTH, **pattern)


def test_it_is_the_same_model_as_this_packages() -> None:
    model = hybrid()
    given = {"hybrid_layer_pattern": PATTERN, "position_embedding_type": "none", "make_vocab_size_divisible_by": 1}
    theirs = settings().model_config(**given, untie_embeddings_and_output_weights=True)
    twin = own.GPTModel(theirs, VOCABULARY, LENGTH, parallel=settings().parallel_options(), seed=7)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert torch.equal(model(IDS), twin(IDS))
    assert model.decoder.num_layers_per_pipeline_rank == 4 and model.hybrid_layer_pattern == PATTERN


SPARSE = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 5, "dsa_indexer_loss_coeff": 0.5}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}


def latent(**more: Any) -> MLATransformerConfig:
    plain = settings()
    given = {each.name: getattr(plain, each.name) for each in fields(plain) if each.init}
    return MLATransformerConfig(**given | {"multi_latent_attention": True, "rope_type": "rope"} | LATENT | more)


def test_layers_of_sparse_attention() -> None:
    """They equal the engine's, the keys are chosen, and the loss of the indexers has gradients."""
    mla = latent(**SPARSE)
    model = hybrid(mla, hybrid_layer_pattern="MD-E")
    given = {"hybrid_layer_pattern": "M*-E", "position_embedding_type": "none", "make_vocab_size_divisible_by": 1}
    given |= {"experimental_attention_variant": "dsa", "untie_embeddings_and_output_weights": True} | SPARSE
    twin = own.GPTModel(mla.model_config(**given), VOCABULARY, LENGTH, parallel=mla.parallel_options(), seed=7)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert any("indexer" in name for name in model.state_dict())
    all_keys = hybrid(latent(**SPARSE | {"dsa_indexer_topk": LENGTH}), hybrid_layer_pattern="MD-E")
    with torch.no_grad():
        assert torch.equal(model(IDS), twin(IDS)) and not torch.allclose(model(IDS), all_keys(IDS))
    model(IDS, labels=IDS).mean().backward()
    indexers = [parameter for name, parameter in model.named_parameters() if "indexer" in name]
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in indexers)
    with pytest.raises(ConfigError, match="dsa_indexer_head_dim=2 is too small"):
        hybrid(latent(**SPARSE | {"dsa_indexer_head_dim": 2}), hybrid_layer_pattern="MD-E")


def test_layers_of_multi_token_prediction() -> None:
    given = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    model = hybrid(settings(mtp_num_layers=2), hybrid_layer_pattern=f"{PATTERN}/*E/*E", **given)
    plain = hybrid(hybrid_layer_pattern=PATTERN, **given)
    missing, more = plain.load_state_dict(model.state_dict(), strict=False)
    layers = {name.partition("mtp_model_layer.")[2].partition(".")[0] for name in more if "mtp_model_layer" in name}
    assert not missing and {name.split(".")[0] for name in more} == {"mtp"}
    assert layers >= {"input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"}
    assert torch.equal(model(IDS), plain(IDS)), "further tokens are predicted in training only"
    model(IDS, labels=IDS).mean().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in model.mtp.named_parameters() if "norm" in name
    )
    with pytest.raises(ConfigError, match=r"has 1 layers of multi-token .*pass TransformerConfig\(mtp_num_layers=1\)"):
        hybrid(hybrid_layer_pattern="M*-E/*-")


def test_the_name_of_earlier_releases() -> None:
    model_parallel_cuda_manual_seed(7)
    pattern = {"hybrid_layer_pattern": None, "hybrid_override_pattern": PATTERN}
    model = MambaModel(
        settings(), mamba_stack_spec=mamba_stack_spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, **pattern
    )
    assert isinstance(model, HybridModel) and torch.equal(model(IDS), hybrid()(IDS))


def test_a_causal_mask_is_what_no_mask_says() -> None:
    model = hybrid()
    assert torch.equal(model(IDS, None, MASK), model(IDS))
    with pytest.raises(LayoutError, match="an attention mask cannot be used with layers of the kind mamba2"):
        model(IDS, None, MASK | MASK.mT)


def test_its_configuration_takes_what_a_training_sets() -> None:
    model = hybrid()
    for name in ("grad_scale_func", "no_sync_func", "finalize_model_grads_func", "timers"):
        setattr(model.config, name, print)
    model.config.moe_aux_loss_coeff = 0.0
    with pytest.raises(ConfigError, match="its layers cannot change hidden_size"):
        model.config.hidden_size = 64
    with pytest.raises(ConfigError, match="its layers cannot change is_hybrid_model"):
        model.config.is_hybrid_model = False


def test_fp8_and_mup_are_refused() -> None:
    fp8, mup = settings(params_dtype=torch.bfloat16, bf16=True, fp8="hybrid"), settings(use_mup=True)
    for given, message in ((fp8, "fp8_format=hybrid cannot be used"), (mup, "use_mup=True cannot be used")):
        with pytest.raises(ConfigError, match=message):
            hybrid(given)


def losses(ranks: int) -> Tensor:
    parallel_state.initialize_model_parallel(ranks)
    model = hybrid(settings(tensor_model_parallel_size=ranks))
    return model(IDS, labels=IDS).detach()


def test_tensor_parallel_ranks_give_the_losses_of_one() -> None:
    (expected,) = run_ranks(1, losses, 1)
    for found in run_ranks(2, losses, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def of_stages(ranks: int, pattern: str, chunks: int | None) -> list[int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    own_config = settings(pipeline_model_parallel_size=ranks, pipeline_dtype=torch.float64)
    own_config.virtual_pipeline_model_parallel_size = chunks
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    models = [
        hybrid(own_config, hybrid_layer_pattern=pattern, pre_process=first, post_process=last, vp_stage=chunk)
        for chunk in (range(chunks) if chunks else [None])
    ]
    assert own_config.pipeline_model_parallel_layout is None, "another pattern may follow"
    own_config.num_layers_in_first_pipeline_stage = 2
    with pytest.raises(ConfigError, match="num_layers_in_first_pipeline_stage=2 assign layers to stages"):
        hybrid(own_config, hybrid_layer_pattern=pattern, vp_stage=0)
    return [model.decoder.num_layers_per_pipeline_rank for model in models]


def test_stages_are_those_of_the_pattern() -> None:
    for pattern, chunks, expected in (("M|*-E", None, [[1], [3]]), ("M|*|-|E", 2, [[1, 1], [1, 1]])):
        assert run_ranks(2, of_stages, 2, pattern, chunks) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hybrid_layer_pattern": None}, "give a pattern with one letter for each layer, and no ratios"),
        ({"hybrid_attention_ratio": 0.5}, "hybrid_attention_ratio=0.5"),
        ({"hybrid_layer_pattern": "M*"}, "num_layers=4 must be 2, the number of letters in hybrid_layer_pattern=M"),
        ({"hybrid_layer_pattern": "M*|-E"}, "M*|-E has 2 stages for each pipeline rank"),
        ({"hybrid_layer_pattern": "M+-E"}, "M+-E has layers + or D; pass an MLATransformerConfig"),
        ({"hybrid_layer_pattern": "MD-E"}, "MD-E has layers + or D; pass an MLATransformerConfig"),
    ],
)
def test_other_patterns_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hybrid(**given)


def test_a_stack_of_own_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="parts of its own are not supported"):
        HybridModel(settings(), ModuleSpec(torch.nn.Linear), VOCABULARY, LENGTH, hybrid_layer_pattern=PATTERN)
