"""Initial weights are independent samples of a normal distribution with the standard deviation of the paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.plain.engine import engine_trace, start_of
from tests.plain.rows import EXPERTS, LATENT, LLAMA, MTP, Values

WIDE = {"hidden_size": 96, "ffn_hidden_size": 192, "vocab_size": 600, "num_layers": 3, "num_attention_heads": 4}
CASES: dict[str, Values] = {
    "dense": LLAMA | {"init_method_std": 0.05},
    "embeddings apart": {"init_method_std": 0.03, "embedding_init_method_std": 0.2},
    "experts": EXPERTS | {"init_method_std": 0.05, "moe_ffn_hidden_size": 64},
    "mup": LLAMA | {"use_mup": True, "mup_base_hidden_size": 24, "init_method_std": 0.04},
    "latent experts": EXPERTS
    | {
        "init_method_std": 0.05,
        "moe_ffn_hidden_size": 64,
        "moe_latent_size": 48,
        "moe_shared_expert_intermediate_size": 64,
    },
    "norms plus one": {"apply_layernorm_1p": True, "init_method_std": 0.05},
    "latent attention": LATENT | {"init_method_std": 0.05, "kv_lora_rank": 40, "v_head_dim": 24},
    "later tokens": MTP | {"init_method_std": 0.05},
    "layers of one part": LLAMA | {"hybrid_layer_pattern": "*-*", "init_method_std": 0.05},
}
JOINS_STREAM = ("linear_proj.weight", "linear_fc2.weight", "fc2_latent_proj.weight")


def deviation(values: Values, name: str) -> float:
    """The standard deviation: that of the settings, divided by sqrt(2 layers) if the output joins the residual stream
    (Radford et al. 2019, section 2.3), and by sqrt(width / base width) (Yang et al. 2022, table 8)."""
    std = values["init_method_std"]
    table = name.startswith("embedding") or (name.startswith("output_layer") and "use_mup" in values)
    if table:
        return values.get("embedding_init_method_std") or std
    if name.startswith("output_layer"):
        return std
    width = values["hidden_size"] / values.get("mup_base_hidden_size", values["hidden_size"])
    parts = values["num_layers"] * (1 if "hybrid_layer_pattern" in values else 2)
    return std / math.sqrt(width) / (math.sqrt(parts) if name.endswith(JOINS_STREAM) else 1.0)


def check_normal(weight: Tensor, std: float, name: str) -> None:
    """Mean, deviation, fourth moment and correlation of neighbours, each within 6 of its standard deviations."""
    x = weight.flatten() / std
    root = math.sqrt(len(x))
    assert abs(x.mean()) < 6 / root, f"mean of {name}"
    assert abs(x.pow(2).mean() - 1) < 6 * math.sqrt(2) / root, (
        f"deviation of {name}: {x.std() * std:.4f}, not {std:.4f}"
    )
    assert abs(x.pow(4).mean() - 3) < 6 * math.sqrt(96) / root, f"fourth moment of {name}"
    assert abs((x[1:] * x[:-1]).mean()) < 6 / root, f"neighbours of {name}"


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES)
def test_initial_weights(case: str) -> None:
    values = WIDE | CASES[case]
    start = start_of(engine_trace(values, 0))
    matrices = {name: weight for name, weight in start.items() if weight.dim() > 1}
    for name, weight in matrices.items():
        check_normal(weight, deviation(values, name), name)
    pairs = torch.stack(
        [weight.flatten()[:1000] / weight.std() for weight in matrices.values() if weight.numel() > 999]
    )
    products = (pairs @ pairs.T / 1000).fill_diagonal_(0.0)
    assert products.abs().max() < 6 / math.sqrt(1000), "weights with common numbers"
    for name in start.keys() - matrices.keys():
        expected = float(name.endswith("weight") and not CASES[case].get("apply_layernorm_1p"))
        assert (start[name] == expected).all(), f"{name} begins with {expected}"


def test_initial_connections() -> None:
    """Uniform weights between -a and a, a = sqrt(6 / (rows + columns)) (Glorot and Bengio 2010, equation 16)."""
    start = start_of(engine_trace(WIDE | {"enable_mhc_connections": True, "mhc_init_gating_factor": 0.2}, 0))
    weights = [weight for name, weight in start.items() if name.endswith("mapping_proj.weight")]
    assert len(weights) == 6 and not weights[0].equal(weights[1])
    bound = math.sqrt(6 / (24 + 4 * 96))
    for weight in weights:
        assert weight.shape == (24, 4 * 96)
        assert 0.99 * bound < weight.abs().max() < 1.001 * bound
        assert abs(weight.pow(2).mean() / (bound**2 / 3) - 1) < 6 * math.sqrt(4 / 5 / weight.numel())
    assert all((start[name] - 0.2).abs() < 1e-7 for name in start if ".alpha_" in name)
    assert all((start[name] == 0.0).all() for name in start if name.endswith("hyper_connection.bias"))


def test_another_seed() -> None:
    first, second = (start_of(engine_trace(WIDE | {"seed": seed}, 0)) for seed in (1, 2))
    assert all(not first[name].equal(second[name]) for name in first if first[name].dim() > 1)
