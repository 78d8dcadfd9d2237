"""Layouts with a residual stream in float32, and weights in 16 bits, compute what one process computes."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.verify import trace_training
from megatron_core.verify.bounds import Bounds
from tests.parity.invariant_rows import differing
from tests.parity.rows import BASE, FULL_UNIFORM, MODERN, PP2, SDPA, SP, TP2, UNTIED, V2, ZERO, baseline_of, noise_of
from tests.parity.test_fp8 import CALM
from tests.parity.test_matrix import faults

BF16 = {"fp64": False, "bf16": True}
WIDE = BF16 | {"fp32_residual_connection": True}
EQUAL = SDPA | {"layout_invariant": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "core_attn", "mlp")}
OFFLOAD = SDPA | {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
MAMBA = {"mamba_state_dim": 24, "mamba_head_dim": 8, "mamba_num_groups": 4, "hybrid_layer_pattern": "M*-M"}
SAME_BITS = {
    "pp2 v2, recomputed": (2, UNTIED, PP2 | V2 | FULL_UNIFORM),
    "selective recomputation": (1, {}, SELECTIVE),
    "offloaded": (1, SDPA, OFFLOAD),
    "multi-token prediction, pp2": (2, MODERN | {"mtp_num_layers": 1}, PP2),
    "experts, pp2": (2, MODERN | {"num_experts": 4, "moe_router_topk": 2}, PP2),
    "hybrid, pp2": (2, MODERN | MAMBA | {"qk_layernorm": False, "hidden_dropout": 0.0}, PP2),
    "FP8, pp2": (2, MODERN | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, PP2),
    "compiled": (1, MODERN, {"compile": True, "compile_backend": "aot_eager"}),
    "float16, pp2": (2, UNTIED | {"bf16": False, "fp16": True, "loss_scale": 64.0}, PP2),
    "layout invariant, tp2 sp": (2, EQUAL, TP2 | SP),
    "layout invariant, dp2 zero3": (2, MODERN | EQUAL, {"zero_stage": 3}),
    "layout invariant, cp2": (2, MODERN | EQUAL, {"context_parallel_size": 2}),
}
"""Rows whose sums have the order of one process: ranks, model, layout or way of computing."""
NOISY = {"tp2": TP2, "pp2": PP2, "tp2 sp": TP2 | SP, "dp2 zero1": ZERO}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("row", SAME_BITS)
def test_bits_are_those_of_one_process(row: str) -> None:
    """Except for norms of gradients, whose parts the ranks add in another order."""
    size, model, layout = SAME_BITS[row]
    alone = trace_training(RunConfig.from_flat(BASE | WIDE | model), 1)
    found = trace_training(RunConfig.from_flat(BASE | WIDE | model | layout), size)
    assert [name for name in differing(found, alone) if name != "norms"] == []


@pytest.mark.whole_matrix
def test_layouts_are_as_exact_as_one_process() -> None:
    """No quantity is much further from float64 than in one process with the same stream."""
    bounds = Bounds("bfloat16", noise_of(BASE | CALM, WIDE | CALM))
    for layout in NOISY.values():
        found = trace_training(RunConfig.from_flat(BASE | WIDE | CALM | layout), 2)
        assert faults(found, baseline_of(BASE | CALM), bounds) == []


@pytest.mark.whole_matrix
def test_gradients_are_closer_to_float64() -> None:
    """In most tensors, because each residual sum of the forward and of the backward is rounded less."""
    narrow, wide = (noise_of(BASE | CALM, each | CALM) for each in (BF16, WIDE))
    names = [name for name in narrow if name.startswith("grad")]
    assert sum(wide[name] < narrow[name] for name in names) > 0.75 * len(names)
