"""The table of attention kinds: every row is true of its layer, and a user's kind works everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from megatron_core.config.attention import ATTENTION_KINDS, GroupedQuery, Projection
from megatron_core.config.flops import forward_flops_per_token
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError
from megatron_core.features.recurrent import RECURRENT
from megatron_core.models import GPTModel
from megatron_core.parallel.groups import LocalGroup
from megatron_core.planner import layer_activations
from megatron_core.planner.footprint import Footprint
from megatron_core.planner.parameters import rank_units
from megatron_core.reports.dry_run import RankEstimate
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SelfAttention, SequenceContext, register_attention
from megatron_core.transformer.layer_spec import ATTENTION_LAYERS, mixer_layer
from megatron_core.verify.gpt import GPTExperiment
from megatron_core.verify.parity import check_parity
from tests.runs import tiny_config


class OutputGate(GroupedQuery):
    """Grouped-query attention with a gate of its own projection on the output."""

    name = "output_gate"
    refused: ClassVar[Mapping[str, str]] = {"attention_output_gate": "which has a gate"}

    def projections(self, tp: int) -> list[Projection]:
        *inputs, output = super().projections(tp)
        return [*inputs, Projection(self.model.hidden_size, output.inputs, "outputs", width="heads x channels"), output]

    def saved(self) -> tuple[int, int]:
        replicated, of_heads = super().saved()
        return replicated, of_heads + 2 * self.output_projection(1).inputs  # sigmoid(gate) and the product


class OutputGateAttention(SelfAttention):
    """x -> W_o (sigmoid(W_g x) * attention)."""

    def __init__(self, context: LayerContext, layer_number: int, **parts: Any) -> None:
        super().__init__(context, layer_number, **parts)
        config = context.config
        self.linear_gate = context.column_linear(
            config.hidden_size, config.num_attention_heads * config.head_size, bias=False
        )

    def attend(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        gate, _ = self.linear_gate(hidden)
        return super().attend(hidden, context) * gate.sigmoid()


@pytest.fixture
def output_gate() -> Iterator[None]:
    register_attention(OutputGate, OutputGateAttention)
    yield
    del ATTENTION_KINDS["output_gate"], ATTENTION_LAYERS["output_gate"]


LATENTS = {"multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4}
INDEXER = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 6,
    "attention_dropout": 0.0,
}
GROUPS = {"group_query_attention": True, "num_query_groups": 2}
KINDS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped-query": GROUPS,
    "gated": GROUPS | {"attention_output_gate": True},
    "latent": LATENTS | {"v_head_dim": 10},
    "latent queries": LATENTS | {"v_head_dim": 4, "q_lora_rank": 12, "qk_layernorm": True},
    "sparse": LATENTS | INDEXER | {"q_lora_rank": 12, "qk_layernorm": True, "dsa_indexer_loss_coeff": 1.0},
    "gated delta net": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": (1, 0),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
    },
    "kimi delta attention": {
        "experimental_attention_variant": "kimi_delta_attention",
        "linear_attention_freq": (1, 0),
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
    },
    "mamba": {
        "hybrid_layer_pattern": "M-",
        "mamba_state_dim": 6,
        "mamba_head_dim": 4,
        "mamba_num_groups": 2,
        "mamba_num_heads": 6,
    },
    "gated delta product": {
        "hybrid_layer_pattern": "M-",
        "mamba_mixer": "gated_delta_product",
        "gdp_num_householder": 2,
        "mamba_state_dim": 6,
        "mamba_head_dim": 4,
        "mamba_num_groups": 2,
        "mamba_num_heads": 6,
    },
    "attention and mamba": GROUPS
    | {
        "hybrid_layer_pattern": "H-",
        "mamba_state_dim": 6,
        "mamba_head_dim": 4,
        "mamba_num_groups": 2,
        "mamba_num_heads": 6,
        "mamba_output_norm": "none",
    },
    "short convolution": {"hybrid_layer_pattern": "C-"},
    "a user's": GROUPS | {"attention_kind": "output_gate", "qk_layernorm": True},
}


def test_every_kind_is_compared(output_gate: None) -> None:
    assert ATTENTION_LAYERS.keys() == {"grouped_query", "output_gate"}
    assert ATTENTION_KINDS.keys() == ATTENTION_LAYERS.keys()
    recurrences = RECURRENT.attention_kinds.keys() - {"attention_and_mamba2"}
    assert recurrences == {
        *("gated_delta_net", "gated_delta_product", "kimi_delta_attention", "mamba2", "short_convolution")
    }
    for name in (*ATTENTION_KINDS, "latent", "sparse_latent", *recurrences):
        assert issubclass(mixer_layer(name), nn.Module)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_flops_are_those_of_the_matrices(settings: dict[str, Any], output_gate: None) -> None:
    """Two FLOPs per element of a matrix and token."""
    config = tiny_config(**settings)
    model = GPTModel(config.model, 61, 16)
    matrices = [w for name, w in model.named_parameters() if ".self_attention." in name and w.dim() == 2]
    terms = forward_flops_per_token(config.model, 16, 61)
    assert terms["qkv"] + terms["output"] == 2 * sum(matrix.numel() for matrix in matrices)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_are_those_of_the_model(settings: dict[str, Any], tp: int, output_gate: None) -> None:
    found = RankEstimate.of(tiny_config(**settings, tensor_model_parallel_size=tp, vocab_size=64), tp)
    units = rank_units(found.config, found.layers, found.plan.stage_to_rank, found.vocab_size)
    assert sum(unit.total for unit in units[0]) == found.parameters
    state = Footprint.of(found.config, tp, found.plan, found.layers, units, found.vocab_size).state(0)
    assert state["optimizer"] == 8 * found.parameters


def test_activations_of_a_gate_are_those_kept_for_backward(output_gate: None) -> None:
    """The tensors that a layer keeps with the gate and without it."""
    sizes = {"hidden_size": 64, "seq_length": 128, "micro_batch_size": 2, "num_layers": 1}
    found, planned = [], []
    for kind in ("grouped_query", "output_gate"):
        config = tiny_config(**sizes, attention_kind=kind)
        context = LayerContext(config.model, ModelParallelConfig(), LocalGroup(), 1)
        layer = mixer_layer(kind)(context, 0)
        weights = {parameter.data_ptr() for parameter in layer.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        hidden = torch.randn(128, 2, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(hidden, SequenceContext())
        found.append(sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights))
        planned.append(layer_activations(config))
    assert planned[1] - planned[0] == pytest.approx(found[1] - found[0], rel=0.05)


def test_a_kind_of_a_user_is_its_formula(output_gate: None) -> None:
    config = tiny_config(attention_kind="output_gate").model
    context = LayerContext(config, ModelParallelConfig(params_dtype=torch.float64), LocalGroup(), 1)
    layer = OutputGateAttention(context, 0)
    given: list[Tensor] = []
    layer.linear_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    plain = SelfAttention(context, 0)
    plain.linear_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "linear_gate" not in name})
    hidden = torch.randn(16, 2, 32, dtype=torch.float64)
    for each in (layer, plain):
        each(hidden, SequenceContext())
    gate = nn.functional.linear(hidden, layer.linear_gate.weight)
    torch.testing.assert_close(given[0], torch.sigmoid(gate) * given[1], rtol=1e-12, atol=1e-14)


def test_a_kind_of_a_user_in_every_layout_is_that_of_one_process(output_gate: None) -> None:
    config = tiny_config(**KINDS["a user's"], position_embedding_type="rope", mtp_num_layers=1)
    report = check_parity(GPTExperiment(config, steps=2), ["tp2", "tp2 sp", "dp2 zero3"])
    assert all(row.holds for row in report.rows), report.as_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_kind": "sparse"}, "attention_kind=sparse is unknown; legal: grouped_query"),
        ({"attention_kind": "latent"}, "attention_kind=latent is unknown; legal: grouped_query"),
        (LATENTS | GROUPS, "group_query_attention=True cannot be used with --multi-latent-attention; remove"),
        (LATENTS | {"use_mup": True}, "use_mup=True cannot be used with --multi-latent-attention; remove"),
    ],
)
def test_faults(settings: dict[str, Any], message: str) -> None:
    (fault,) = problems(tiny_config(**settings), 1)
    assert fault.startswith(message)


def test_faults_of_a_users_kind(output_gate: None) -> None:
    (fault,) = problems(tiny_config(**LATENTS, attention_kind="output_gate"), 1)
    assert fault.startswith("attention_kind=output_gate and multi_latent_attention=True exclude one another")
    (fault,) = problems(tiny_config(attention_kind="output_gate", attention_output_gate=True), 1)
    assert fault == (
        "attention_output_gate=True cannot be used with attention_kind=output_gate, which has a gate; remove it"
    )
    with pytest.raises(ConfigError, match="'output_gate' is already registered"):
        register_attention(OutputGate, OutputGateAttention)
