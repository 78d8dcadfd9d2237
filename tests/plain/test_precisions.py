"""Narrower numbers stay near the plain model in float64, and the dynamic loss scale follows its rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.features.loss_scaling.scale import DynamicLossScale
from tests.plain.engine import BASE, differences, engine_trace, samples_of, settings_of, start_of
from tests.plain.optimizers import loss_scales
from tests.plain.rows import EXPERTS, LLAMA, Values
from tests.plain.training import train

NARROW = {"adam_eps": 1e-3, "clip_grad": 1.0, "init_method_std": 0.1, "fp64": False}
"""With a smaller epsilon, elements whose true gradient is 0 move by rounding errors alone."""
MUON = LLAMA | NARROW | {"optimizer": "muon"}
BF16 = NARROW | {"bf16": True}
STATE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
BOUNDS: dict[str, tuple[Values, float, float]] = {
    "float32": (LLAMA | NARROW, 3e-7, 3e-6),
    "float32, muon": (MUON | {"muon_fp32_matmul_prec": "highest"}, 3e-7, 3e-6),
    "float32, muon, high": (MUON | {"muon_fp32_matmul_prec": "high"}, 3e-7, 3e-6),
    "float32, muon in bf16": (MUON, 3e-4, 3e-6),
    "bf16": (LLAMA | BF16, 3e-4, 0.04),
    "bf16, wide stream": (LLAMA | BF16 | {"fp32_residual_connection": True}, 3e-4, 0.04),
    "bf16 state": (LLAMA | BF16 | STATE | {"main_params_dtype": "bf16"}, 3e-4, 0.04),
    "bf16, gradients summed in bf16": (LLAMA | BF16 | {"grad_reduce_in_bf16": True}, 3e-4, 0.04),
    "bf16, gradients summed in bf16 and float32": (
        LLAMA
        | BF16
        | {
            "grad_reduce_in_bf16": True,
            "ddp_reduce_scatter_with_fp32_accumulation": True,
            "use_distributed_optimizer": True,
        },
        3e-4,
        0.04,
    ),
    "fp16": (LLAMA | NARROW | {"fp16": True, "initial_loss_scale": 2.0**14}, 5e-5, 8e-3),
    "fp16, constant scale, experts": (EXPERTS | NARROW | {"fp16": True, "loss_scale": 512.0}, 5e-5, 8e-3),
}
"""Settings, and bounds of losses and of gradients: rounding is 2^-24, 2^-9 and 2^-11, and grows with the layers."""


@pytest.mark.every_case
@pytest.mark.parametrize("case", BOUNDS)
def test_near_float64(case: str) -> None:
    values, of_losses, of_gradients = BOUNDS[case]
    trace = engine_trace(values, 2, world_size=2 if "summed" in case else 1)
    settings = settings_of(values)
    record = train(settings, start_of(trace), samples_of(BASE | values, 8), 2)
    scale = settings.loss_scale or settings.initial_loss_scale if settings.fp16 else 1.0
    found = differences(trace, record, scale)
    assert max(error for name, error in found.items() if name.startswith("loss")) < of_losses
    errors = {name: error for name, error in found.items() if name.startswith("grad0")}
    assert max(errors.values()) < of_gradients, max(errors, key=errors.get)


@pytest.mark.whole_matrix
@given(
    overflows=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    lowest=st.sampled_from([1.0, 2.0**9]),
)
def test_loss_scale(overflows: list[bool], window: int, hysteresis: int, lowest: float) -> None:
    scale = DynamicLossScale(2.0**10, lowest, window=window, hysteresis=hysteresis)
    found = []
    for overflow in overflows:
        found.append(scale.scale)
        scale.update(overflow)
    assert found == loss_scales(overflows, 2.0**10, lowest, window, hysteresis)
