"""Update rules of one weight each, schedules of learning rate and weight decay, and the dynamic loss scale."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

State = dict[str, Tensor]


def adam(s: SimpleNamespace, w: Tensor, g: Tensor, state: State, t: int, lr: float, wd: float, eps: float) -> Tensor:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2, lines 6 to 12)."""
    m = state["m"] = s.adam_beta1 * state.get("m", 0 * w) + (1 - s.adam_beta1) * g
    v = state["v"] = s.adam_beta2 * state.get("v", 0 * w) + (1 - s.adam_beta2) * g**2
    if s.adam_bias_correction:
        m, v = m / (1 - s.adam_beta1**t), v / (1 - s.adam_beta2**t)
    return w - lr * (m / (v.sqrt() + eps) + wd * w)


def sgd(s: SimpleNamespace, w: Tensor, g: Tensor, state: State, t: int, lr: float, wd: float, eps: float) -> Tensor:
    """torch.optim.SGD: m = mu m + g + wd w; w - lr m."""
    g = g + wd * w
    m = state["m"] = s.sgd_momentum * state["m"] + g if "m" in state else g
    return w - lr * m


def lion(s: SimpleNamespace, w: Tensor, g: Tensor, state: State, t: int, lr: float, wd: float, eps: float) -> Tensor:
    """Lion (Chen et al. 2023, algorithm 2)."""
    m = state.get("m", 0 * w)
    direction = torch.sign(s.lion_beta1 * m + (1 - s.lion_beta1) * g)
    state["m"] = s.lion_beta2 * m + (1 - s.lion_beta2) * g
    return w - lr * (direction + wd * w)


def lamb(s: SimpleNamespace, w: Tensor, g: Tensor, state: State, t: int, lr: float, wd: float, eps: float) -> Tensor:
    """LAMB (You et al. 2019, algorithm 2), with limits of the trust ratio."""
    m = state["m"] = s.adam_beta1 * state.get("m", 0 * w) + (1 - s.adam_beta1) * g
    v = state["v"] = s.adam_beta2 * state.get("v", 0 * w) + (1 - s.adam_beta2) * g**2
    first, second = 1 - s.adam_beta1**t, 1 - s.adam_beta2**t
    if s.lamb_bias_correction == "moments":
        m, v = m / first, v / second
    elif s.lamb_bias_correction == "rate":  # DeepSpeed's kernel
        lr = lr * math.sqrt(second) / first
    r = m / (v.sqrt() + eps) + wd * w
    sizes = w.norm().item(), r.norm().item()
    ratio = min(max(sizes[0] / sizes[1], s.lamb_min_coeff), s.lamb_max_coeff) if all(sizes) else 1.0
    return w - lr * ratio * r


QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
SIMPLE = ((3.4445, -4.7750, 2.0315),)
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
"""Amsel et al. 2025 (arXiv 2505.16932), appendix G, with the safety factor; further iterations repeat the last row."""


def orthogonal(s: SimpleNamespace, matrix: Tensor) -> Tensor:
    """Newton-Schulz: x = a x + b (x x^T) x + c (x x^T)^2 x from x / |x| (Jordan et al. 2024)."""
    turned = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if turned else matrix) / matrix.norm().clamp(min=1e-15)
    kind = s.muon_coefficient_type
    rows = {"quintic": QUINTIC, "simple": SIMPLE, "polar_express": POLAR_EXPRESS}[kind]
    for step in range(s.muon_num_ns_steps):
        a, b, c = rows[min(step, len(rows) - 1) if kind == "polar_express" else step % len(rows)]
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x.T if turned else x


def muon_scale(s: SimpleNamespace, rows: int, columns: int) -> float:
    """sqrt(max(rows, columns)) (Liu et al. 2025, section 2.2), or the scales of Jordan et al. and Bernstein 2025."""
    square = {
        "spectral": max(rows, columns),
        "unit_rms_norm": rows / columns,
        "shape_scaling": max(1.0, rows / columns),
    }[s.muon_scale_mode]
    return math.sqrt(square) * s.muon_extra_scale_factor


def parts_of(s: SimpleNamespace, name: str, split_qkv: bool, split_gate: bool, heads: bool) -> list[Tensor] | None:
    """The rows of a fused matrix that are a matrix of their own; None: the whole matrix."""
    d = s.kv_channels or s.hidden_size // s.num_attention_heads
    if name.endswith("linear_qkv.weight") and split_qkv:
        groups = (s.num_query_groups or 1) if s.group_query_attention else s.num_attention_heads
        sizes = [s.num_attention_heads // groups] * (2 if s.attention_output_gate else 1) + [1, 1]
        parts: list[list[int]] = [[] for _ in sizes]
        row = 0
        for _ in range(groups):
            for part, size in zip(parts, sizes, strict=True):
                part += range(row, row + size * d)
                row += size * d
        if heads:
            return [torch.tensor(part[i : i + d]) for part in parts for i in range(0, len(part), d)]
        return [torch.tensor(part) for part in parts]
    if name.endswith("linear_fc1.weight") and split_gate and (s.swiglu or s.geglu or s.quick_geglu):
        half = (s.moe_ffn_hidden_size or s.ffn_hidden_size) if "experts" in name else s.ffn_hidden_size
        return [torch.arange(half), torch.arange(half, 2 * half)]
    return None


def muon(s: SimpleNamespace, name: str, w: Tensor, g: Tensor, state: State, lr: float, wd: float) -> Tensor:
    """Muon (Jordan et al. 2024; Liu et al. 2025, equation 4); adaptive_muon: AdaMuon (Si et al. 2025) or NorMuon.

    m = mu m + g; w (1 - lr wd) - lr scale orthogonal(m), of each expert and of each part of a fused matrix.
    """
    if w.dim() == 3:  # each expert
        states = [{key: value[e] for key, value in state.items()} for e in range(len(w))]
        new = torch.stack([muon(s, name, w[e], g[e], states[e], lr, wd) for e in range(len(w))])
        state.update({key: torch.stack([of_expert[key] for of_expert in states]) for key in states[0]})
        return new
    m = state["m"] = s.muon_momentum * state.get("m", 0 * w) + g
    direction = g + s.muon_momentum * m if s.muon_nesterov else m
    parts = parts_of(s, name, s.muon_split_qkv, s.muon_split_gate_up, s.muon_split_heads)
    update = torch.zeros_like(w)
    adaptive = s.optimizer == "adaptive_muon"
    for rows in parts or [torch.arange(len(w))]:
        part = orthogonal(s, direction[rows])
        update[rows] = part if adaptive else part * muon_scale(s, *part.shape)
    if adaptive:
        update = second_moment(s, update, state) * muon_scale(s, *w.shape)
    return w - lr * wd * w - lr * update


def second_moment(s: SimpleNamespace, o: Tensor, state: State) -> Tensor:
    """AdaMuon: O / (sqrt(v) + eps), v the mean of O^2 (Si et al. 2025, algorithm 1); NorMuon: v of each row or column,
    and the size of O is kept (Li et al. 2025, algorithm 1)."""
    b, eps = s.adaptive_muon_beta2, s.adaptive_muon_eps
    if s.adaptive_muon_moment2_method == "adamuon":
        v = state["v"] = b * state.get("v", 0 * o) + (1 - b) * o**2
        return o / (v.sqrt() + eps)
    squares = (o**2).mean(1 if o.shape[0] >= o.shape[1] else 0, keepdim=True)
    v = state["v"] = b * state.get("v", 0 * squares) + (1 - b) * squares
    u = o / v.clamp(min=eps).sqrt()
    return u * o.norm() / u.norm().clamp(min=eps)


def soap(s: SimpleNamespace, name: str, w: Tensor, g: Tensor, state: State, t: int, lr: float, wd: float) -> Tensor:
    """SOAP (Vyas et al. 2024, algorithm 3), of each expert and of each part of a fused matrix.

    The engine's first step has Q = I. Unlike the authors' code it adds 1/1000 of the mean eigenvalue to a factor before
    each QR iteration; 10 iterations from ``scattered`` follow the first gradient (docstring of its ``SOAP``).
    """
    if w.dim() == 3:
        states = [{key: value[e] for key, value in state.items()} for e in range(len(w))]
        new = torch.stack([soap(s, name, w[e], g[e], states[e], t, lr, wd) for e in range(len(w))])
        state.update({key: torch.stack([of_expert[key] for of_expert in states]) for key in states[0]})
        return new
    parts = parts_of(s, name, s.soap_split_qkv, s.soap_split_gate_up, heads=False)
    update = torch.zeros_like(w)
    for number, rows in enumerate(parts or [torch.arange(len(w))]):
        own = {key.split("/")[1]: value for key, value in state.items() if key.startswith(f"{number}/")}
        update[rows] = soap_of_part(s, g[rows], own, t)
        state.update({f"{number}/{key}": value for key, value in own.items()})
    return w - lr * wd * w - lr * update


def soap_of_part(s: SimpleNamespace, g: Tensor, state: State, t: int) -> Tensor:
    """The update of one matrix: Adam in the bases of the factors L and R."""
    m = state["m"] = s.adam_beta1 * state.get("m", 0 * g) + (1 - s.adam_beta1) * g
    bases = [state.get(f"q{side}", torch.eye(size).double()) for side, size in enumerate(g.shape)]
    turned = bases[0].T @ g @ bases[1]
    v = state["v"] = s.adam_beta2 * state.get("v", 0 * g) + (1 - s.adam_beta2) * turned**2
    first, second = (1 - s.adam_beta1**t, 1 - s.adam_beta2**t) if s.adam_bias_correction else (1.0, 1.0)
    step = (bases[0].T @ m @ bases[1] / first) / ((v / second).sqrt() + s.adam_eps)
    for side, product in enumerate((g @ g.T, g.T @ g)):
        if len(product) > s.soap_max_precondition_dim:
            continue
        old = state.get(f"p{side}", 0 * product)
        factor = state[f"p{side}"] = s.soap_shampoo_beta * old + (1 - s.soap_shampoo_beta) * product
        q = bases[side]
        if t == 1 and factor.any():
            q = scattered(len(q))
        times = 10 if t == 1 else int(t % s.soap_precondition_frequency == 0)
        for _ in range(times):
            mean = factor.diagonal().mean().clamp(min=1e-300)
            q = torch.linalg.qr(factor / mean @ q + 1e-3 * q).Q
        state[f"q{side}"] = q
    return bases[0] @ step @ bases[1].T


def scattered(n: int) -> Tensor:
    """The orthogonal factor of a matrix of n x n normal numbers, those of torch's generator with the seed 1."""
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q


def learning_rate(s: SimpleNamespace, n: int, last: int, highest: float, lowest: float) -> float:
    """The rate of step ``n`` (from 1) of ``last``, or of sequence ``n``: linear warm-up, then a decay.

    cosine: Loshchilov and Hutter 2017, equation 5; inverse-square-root: Vaswani et al. 2017, section 5.3; WSD: Hu et
    al. 2024, section 4.2.
    """
    end = s.lr_decay_iters or s.lr_decay_samples or last
    warm = s.lr_warmup_iters or s.lr_warmup_samples
    if s.lr_warmup_fraction is not None:
        warm = s.lr_warmup_fraction * end
    if warm and n <= warm:
        return s.lr_warmup_init + (highest - s.lr_warmup_init) * n / warm
    if s.lr_decay_style == "constant":
        return highest
    if n > end:
        return lowest
    if s.lr_decay_style == "inverse-square-root":
        return max(lowest, highest * math.sqrt(warm or 1) / math.sqrt(n))
    if s.lr_decay_style == "WSD":
        phase = s.lr_wsd_decay_iters or s.lr_wsd_decay_samples
        done = (n - end + phase) / phase
        shape = s.lr_wsd_decay_style
    else:
        done, shape = (n - warm) / (end - warm), s.lr_decay_style
    share = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "exponential": 2 * 0.5**done - 1,
        "minus_sqrt": 1 - math.sqrt(max(done, 0.0)),
    }[shape]
    return lowest + (highest - lowest) * (share if done > 0 else 1.0)


def weight_decay(s: SimpleNamespace, n: int, last: int) -> float:
    """The weight decay of step ``n``: constant, or from start to end linearly or along half a cosine."""
    if s.weight_decay_incr_style == "constant":
        return s.weight_decay
    start, end, share = s.start_weight_decay, s.end_weight_decay, min(n / last, 1.0)
    if s.weight_decay_incr_style == "linear":
        return start + (end - start) * share
    return start + (end - start) * (1 + math.cos(math.pi * (1 - share))) / 2


def loss_scales(overflows: list[bool], initial: float, lowest: float, window: int, hysteresis: int) -> list[float]:
    """The loss scale of each step (Micikevicius et al. 2018, section 3.2; Megatron-LM's rule): halved from the
    ``hysteresis``-th overflow on, which is counted since it last grew, and doubled after ``window`` good steps."""
    scale, good, bad, scales = initial, 0, 0, []
    for overflow in overflows:
        scales.append(scale)
        if overflow:
            good, bad = 0, bad + 1
            scale = max(scale / 2, lowest) if bad >= hysteresis else scale
        else:
            good += 1
            if good % window == 0:
                scale, bad = scale * 2, 0
    return scales
