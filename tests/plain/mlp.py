"""The feed-forward part of a layer: two matrices around an activation function, or a mixture of experts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.plain.norms import Weights, under


def gelu(s: SimpleNamespace, x: Tensor) -> Tensor:
    """x Phi(x), or its approximation by tanh (Hendrycks and Gimpel 2016, section 2)."""
    if s.openai_gelu:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def xielu(x: Tensor, w: Weights) -> Tensor:
    """x > 0: a_p x^2 + x / 2; x <= 0: a_n (e^x - 1 - x) + x / 2 (Huang and Schlag 2024, section 3.2).

    a_p = log(1 + e^p) and a_n = 1/2 + log(1 + e^n) of the learned p and n. The published code bounds the exponent by
    -1e-6.
    """
    a_p = torch.log1p(w["alpha_p"].exp())
    a_n = 0.5 + torch.log1p(w["alpha_n"].exp())
    negative = a_n * (torch.expm1(x.clamp(max=-1e-6)) - x) + 0.5 * x
    return torch.where(x > 0, a_p * x * x + 0.5 * x, negative)


def activation(s: SimpleNamespace, inner: Tensor, w: Weights) -> Tensor:
    """f(inner); gated: f(gate) (up + offset) of both halves (Shazeer 2020, equations 5 and 6; gpt-oss)."""
    if s.swiglu or s.geglu or s.quick_geglu:
        gate, up = inner.chunk(2, -1)
        if s.activation_func_clamp_value:
            bound = s.activation_func_clamp_value
            gate, up = gate.clamp(max=bound), up.clamp(min=-bound, max=bound)
        if s.swiglu:
            gate = gate * torch.sigmoid(gate)
        elif s.geglu:
            gate = gelu(s, gate)
        else:
            gate = gate * torch.sigmoid(1.702 * gate)
        return gate * (up + s.glu_linear_offset)
    if s.squared_relu:
        return torch.relu(inner) ** 2  # So et al. 2021, section 3
    if s.relu:
        return torch.relu(inner)
    return xielu(inner, under(w, "activation")) if s.xielu else gelu(s, inner)


def width_of(s: SimpleNamespace) -> int:
    """Width of an MLP: by default 4 h, or with gates 8/3 h, a multiple of 64 (Shazeer 2020, section 3.1)."""
    if s.ffn_hidden_size:
        return s.ffn_hidden_size
    if s.swiglu or s.geglu or s.quick_geglu:
        return max(64, s.hidden_size * 8 // 3 // 64 * 64)
    return 4 * s.hidden_size


def mlp(s: SimpleNamespace, x: Tensor, w: Weights) -> Tensor:
    """W_2 f(W_1 x + b_1) + b_2; Falcon-H1 has factors on the gates and on the output."""
    inner = x @ w["linear_fc1.weight"].T
    if not s.disable_bias_linear:
        inner = inner + w["linear_fc1.bias"]
    if s.mlp_multipliers[0] != 1:
        gate, up = inner.chunk(2, -1)
        inner = torch.cat([s.mlp_multipliers[0] * gate, up], -1)
    output = activation(s, inner, w) @ w["linear_fc2.weight"].T
    assert w["linear_fc2.weight"].shape[1] == width_of(s)
    if not s.disable_bias_linear:
        output = output + w["linear_fc2.bias"]
    return s.mlp_multipliers[1] * output


def expert(s: SimpleNamespace, x: Tensor, w: Weights, number: int) -> Tensor:
    """The MLP of expert ``number`` of rows ``[n, h]``."""
    inner = x @ w["linear_fc1.weight"][number].T
    if not s.disable_bias_linear:
        inner = inner + w["linear_fc1.bias"][number]
    output = activation(s, inner, {}) @ w["linear_fc2.weight"][number].T
    assert w["linear_fc2.weight"].shape[2] == (s.moe_ffn_hidden_size or width_of(s))
    return output if s.disable_bias_linear else output + w["linear_fc2.bias"][number]


def shared_experts(s: SimpleNamespace, x: Tensor, w: Weights) -> Tensor:
    """The MLP of every token (Dai et al. 2024, equation 9), times sigmoid(g x) in Qwen2-MoE."""
    own = {"mlp_multipliers": (1.0, 1.0), "ffn_hidden_size": s.moe_shared_expert_intermediate_size}
    plain = SimpleNamespace(**vars(s) | own)
    output = mlp(plain, x, w)
    return output * torch.sigmoid(x @ w["gate_weight"].T) if s.moe_shared_expert_gate else output
