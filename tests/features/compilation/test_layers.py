"""--compile: graphs without breaks, shared by equal layers; losses and gradients of every layout as without it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.features.compilation.layers import compile_layers
from megatron_core.training.step import train_step
from megatron_core.transformer import SequenceContext
from megatron_core.transformer.block import TransformerLayer
from megatron_core.transformer.core_attention import fused_attention
from megatron_core.verify import trace_training
from megatron_core.verify.bounds import Bounds
from megatron_core.verify.ranks import RankFailure
from tests.defects.plant import planted
from tests.parity import rows
from tests.parity.context_rows import CP2
from tests.parity.heterogeneous_rows import NEMOTRON
from tests.parity.moe_rows import EP2, MIXTRAL
from tests.parity.rows import BASE, GQA2, MODERN, PACKED, PP2, SP, TP2, ZERO2, ZERO3, baseline_of
from tests.parity.test_matrix import faults
from tests.runs import tiny_config, tiny_run

COMPILE: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}
SMALL = {"num_layers": 2, "global_batch_size": 4}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "qk_layernorm": True}
WINDOW = {"window_size": (4, 0), "attn_logit_softcapping": 5.0}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}


def layer_and_inputs(**settings: Any) -> tuple[TransformerLayer, torch.Tensor, SequenceContext]:
    run = tiny_run(**{"fp64": True, **settings})
    dtype = torch.float64 if settings.get("fp64", True) else torch.float32
    table = torch.rand(16, 1, 4, dtype=dtype) if "position_embedding_type" in settings else None
    context = SequenceContext(
        rotary=None if table is None else (table.cos(), table.sin()),
        sample_index=torch.arange(2),
        positions=torch.arange(16),
        residual_positions=torch.arange(16),
    )
    hidden = torch.randn(16, 2, 32, dtype=dtype, requires_grad=True)
    return run.stages[0].decoder.layers[0], hidden, context


@pytest.mark.parametrize(
    "settings",
    [
        DROPOUT,
        LLAMA,
        LLAMA | {"fp64": False},
        DROPOUT | WINDOW,
        LLAMA | SELECTIVE,
        DROPOUT | {"kernel_backend": "reference"},
    ],
    ids=["gpt", "llama", "float32", "window", "selective recompute", "reference"],
)
def test_a_dense_layer_is_one_graph(settings: dict[str, Any]) -> None:
    layer, hidden, context = layer_and_inputs(**settings)
    found = torch._dynamo.explain(layer.forward)(hidden, context)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
    torch._dynamo.reset()


def test_models_with_other_numbers_of_heads_compile_in_one_process() -> None:
    """Dynamo makes the number of heads a symbol when it changes; torch's kernels take no comparison of symbols."""
    compiled = torch.compile(fused_attention, backend="aot_eager", fullgraph=True)
    for heads, groups in ((4, 2), (2, 1), (8, 4), (4, 4), (6, 3)):
        query, key, value = (torch.randn(2, number, 8, 16, dtype=torch.float64) for number in (heads, groups, groups))
        expected = fused_attention(query, *(x.repeat_interleave(heads // groups, 1) for x in (key, value)), causal=True)
        torch.testing.assert_close(compiled(query, key, value, causal=True), expected, rtol=0, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("settings", [LLAMA, LLAMA | MIXTRAL], ids=["dense", "experts"])
def test_a_deep_copy_of_a_layer_runs_its_own_weights(settings: dict[str, Any]) -> None:
    layer, hidden, context = layer_and_inputs(**settings)
    layer.eval()  # without auxiliary losses
    plain, zeros = deepcopy(layer), deepcopy(layer)
    compile_layers([layer], backend="aot_eager")
    copied = deepcopy(layer)
    with torch.no_grad():
        expected = plain(hidden, context)
        for weight in [*layer.parameters(), *zeros.parameters()]:
            weight.zero_()
        torch.testing.assert_close(copied(hidden, context), expected)
        torch.testing.assert_close(layer(hidden, context), zeros(hidden, context))
    assert not torch.allclose(copied(hidden, context), layer(hidden, context))
    torch._dynamo.reset()


def graphs(settings: dict[str, Any]) -> tuple[list[float], int]:
    """Losses and norms of three steps, and the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run, found = tiny_run(**settings), []
    for _ in range(3):
        result = train_step(run)
        found += [result.loss, result.grad_norm]
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_equal_layers_share_a_graph() -> None:
    """A first graph with the dropout key of its layer, and one with the key as an input, for all others."""
    settings = DROPOUT | {"fp64": True, "num_layers": 5}
    expected, none = graphs(settings)
    found, count = graphs(settings | COMPILE)
    assert none == 0 and count == 2
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.whole_matrix  # a minute of compilation
def test_code_of_inductor_computes_the_same() -> None:
    """Norms, rotations, activations and dropout of the references, which inductor fuses."""
    settings = LLAMA | DROPOUT | {"num_layers": 1, "kernel_backend": "reference", "fp64": True}
    expected, _ = graphs(settings)
    found, count = graphs(settings | {"compile": True})
    assert count == 1
    assert found == pytest.approx(expected, rel=1e-12)


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2 sp": (2, MODERN, TP2 | SP),
    "dp2 zero3, recomputed": (2, rows.FULL_UNIFORM, ZERO3 | rows.OVERLAP),
    "pp2 zb_v": (2, {"num_layers": 4}, PP2 | rows.ZB_V),
    "dp2 ep2": (2, MIXTRAL, EP2),
    "tp2": (2, {}, TP2),
    "pp2": (2, {}, PP2),
    "pp2 dualpipe_v": (2, {"num_layers": 4, "global_batch_size": 8}, PP2 | rows.DUALPIPE_V),
    "dp2 zero2": (2, MODERN, ZERO2 | rows.OVERLAP),
    "tp2, packed": (2, GQA2 | MODERN | PACKED, TP2),
    "cp2": (2, {}, CP2),
    "tp2, selective": (2, SELECTIVE, TP2),
    "tp2 sp, layers of different sizes": (2, NEMOTRON, TP2 | SP),
    "tp2, norm over heads": (2, {"qk_layernorm": True, "qk_layernorm_over_heads": True}, TP2),
    "tp2 sp, one norm, norms of each head": (
        2,
        {
            "parallel_residual": True,
            "parallel_residual_shared_norm": True,
            "disable_bias_layernorm": True,
            "qk_layernorm": True,
            "qk_layernorm_weight_per_head": True,
        },
        TP2 | SP,
    ),
    "tp2 sp, in parts": (2, {}, TP2 | SP | rows.IN_CHUNKS),
}


def trace_faults(name: str) -> list[str]:
    ranks, model, layout = LAYOUTS[name]
    torch._dynamo.reset()
    found = trace_training(RunConfig.from_flat(BASE | SMALL | model | layout | COMPILE), ranks)
    return faults(found, baseline_of(BASE | SMALL | model), Bounds("float64"))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_one_process_computes_without_graphs(layout: str) -> None:
    assert trace_faults(layout) == []


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("layout", "place", "old", "new"),
    [
        (
            "tp2",
            "tensor_parallel.linear:_comm_of",
            "gather, reduce_grad, scatter, reduce, overlap, c",
            "gather, False, scatter, reduce, overlap, c",
        ),
        (
            "tp2, norm over heads",
            "parallel.compiled:CollectiveOperator._backward",
            "adjoint, name, ranks",
            "name, name, ranks",
        ),
        ("pp2", "tensor_parallel.linear:number_weights", "next(_numbers)", "next(_numbers) % 2"),
        ("tp2 sp", "tensor_parallel.linear:_fake_linear", "(ranks if gather else 1)", "1"),
    ],
    ids=["sum of input gradients", "adjoint", "another weight", "shape"],
)
def test_finds(layout: str, place: str, old: str, new: str) -> None:
    with planted(place, old, new):
        try:
            found = trace_faults(layout)
        except RankFailure:
            return
    assert found


def test_releases_that_cannot_trace_shared_memory_are_refused() -> None:
    with mock.patch.object(torch, "__version__", "2.11.0"), pytest.raises(RankFailure, match=r"torch 2\.12 or newer"):
        trace_faults("tp2 sp")


def test_parts_that_stay_eager_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    graphs(COMPILE | {"num_experts": 4})
    assert "compile=True: the layers run as several graphs with experts between them" in capfd.readouterr().out
    graphs(COMPILE)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}, "cannot discard the outputs of"),
        ({"fp8_format": "hybrid"}, "compile=True cannot be used with --fp8-format"),
    ],
    ids=["layernorm", "fp8"],
)
def test_what_cannot_be_compiled_is_refused(settings: dict[str, Any], fault: str) -> None:
    found = list(problems(tiny_config(compile=True, **settings), 1))
    assert any(fault in each for each in found), found
