"""Attention of queries over the keys before them: grouped heads, and latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.plain.norms import Weights, head_norm, norm, rms, under
from tests.plain.rotary import frequencies, rotate, slopes, temperature, unscaled, yarn_m


@dataclass
class Sequences:
    """The positions of tokens and the document of each token, ``[b, t]`` each; ``longest``: positions of the run."""

    positions: Tensor
    documents: Tensor
    longest: int


def linear(x: Tensor, weights: Weights, name: str, *, bias: bool) -> Tensor:
    """W x, plus b with ``bias``."""
    product = x @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if bias else product


def in_pattern(pattern: tuple[int, ...] | None, layer: int, count: int) -> bool:
    """Whether a pattern names a layer: one number n names each n-th layer, several have a 1 for each named layer."""
    layer = min(layer, count - 1)
    if pattern is None:
        return False
    return (layer + 1) % pattern[0] == 0 if len(pattern) == 1 else pattern[layer] == 1


def has_window(s: SimpleNamespace, layer: int) -> bool:
    """Whether a layer has the window: ``window_attn_skip_freq`` names n for full attention, or 1 for the window."""
    skip = s.window_attn_skip_freq
    if s.window_size is None or skip is None:
        return s.window_size is not None
    named = in_pattern(skip, layer, s.num_layers)
    return not named if len(skip) == 1 else named


def visible(s: SimpleNamespace, seq: Sequences, layer: int, rotary: bool) -> Tensor:
    """Which keys ``[b, t, t]`` each query sees: not later ones, in the same document, window and chunk."""
    b, t = seq.positions.shape
    place = torch.arange(t)
    seen = (place[None, :] <= place[:, None]).expand(b, t, t)
    seen = seen & (seq.documents[:, :, None] == seq.documents[:, None, :])
    if has_window(s, layer) and s.window_size[0] >= 0:
        seen = seen & (place[:, None] - place[None, :] <= s.window_size[0])
    if s.attention_chunk_size and rotary:
        starts = torch.stack([(seq.documents < seq.documents[:, i : i + 1]).sum(1) for i in range(t)], 1)
        chunk = (place - starts) // s.attention_chunk_size
        seen = seen & (chunk[:, :, None] == chunk[:, None, :])
    return seen


def attend(
    s: SimpleNamespace, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, **extra: Tensor | None
) -> Tensor:
    """softmax(scale q k + bias) v (Vaswani et al. 2017, section 3.2.1), heads of ``[b, t, heads, d]``.

    ``bias`` ``[b, heads, t, t]``; ``sinks`` ``[heads]`` are scores of a key whose value is 0 (gpt-oss). Scores are
    bounded by c tanh(score / c) (Gemma 2, section 2). Several query heads share a key head (Ainslie et al. 2023).
    """
    shared = query.shape[2] // key.shape[2]
    heads = []
    for head in range(query.shape[2]):
        scores = scale * query[:, :, head] @ key[:, :, head // shared].transpose(1, 2)
        if s.attn_logit_softcapping:
            scores = s.attn_logit_softcapping * torch.tanh(scores / s.attn_logit_softcapping)
        if extra.get("bias") is not None:
            scores = scores + extra["bias"][:, head]
        scores = scores.masked_fill(~seen, -math.inf)
        if extra.get("sinks") is not None:
            sink = extra["sinks"][head].expand(*scores.shape[:2], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if (drop := extra.get("drop")) is not None:
            weights = drop(weights, head)
        heads.append(weights @ value[:, :, head // shared])
    return torch.cat(heads, -1)


def has_rotary(s: SimpleNamespace, layer: int) -> bool:
    """Whether a layer has rotary positions: ``no_rope_freq`` names those without."""
    return s.position_embedding_type == "rope" and not in_pattern(s.no_rope_freq, layer, s.num_layers)


def grouped_query(s: SimpleNamespace, x: Tensor, w: Weights, seq: Sequences, layer: int, drop=None) -> Tensor:
    """x ``[b, t, h]`` -> W_o attention; one matrix has for each group its queries, gates, key and value."""
    d = s.kv_channels or s.hidden_size // s.num_attention_heads
    groups = (s.num_query_groups or 1) if s.group_query_attention else s.num_attention_heads
    queries = s.num_attention_heads // groups
    gates = queries if s.attention_output_gate else 0
    mixed = linear(x, w, "linear_qkv", bias=not s.disable_bias_linear or s.add_qkv_bias)
    mixed = mixed.view(*x.shape[:2], groups, queries + gates + 2, d)
    query = mixed[..., :queries, :].flatten(2, 3)
    gate = mixed[..., queries : queries + gates, :].flatten(2)
    key, value = mixed[..., -2, :], mixed[..., -1, :]
    rotary = has_rotary(s, layer)

    def normed(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if s.qk_layernorm:
            return head_norm(s, query, under(w, "q_layernorm")), head_norm(s, key, under(w, "k_layernorm"))
        if s.qk_l2_norm and (rotary or not s.qk_l2_norm_rotary_only):
            return rms(query, s.norm_epsilon), rms(key, s.norm_epsilon)
        return query, key

    if not s.qk_layernorm_after_rotary:
        query, key = normed(query, key)
    if rotary:
        channels = int(d * s.rotary_percent)
        if has_window(s, layer) and s.rotary_base_of_windows:
            theta, factor = unscaled(s.rotary_base_of_windows, channels), 1.0
        else:
            theta, factor = frequencies(s, channels, seq.longest)
        query, key = (rotate(y, seq.positions, theta, factor, adjacent=s.rotary_interleaved) for y in (query, key))
    if s.qk_layernorm_after_rotary:
        query, key = normed(query, key)
    if s.query_temperature_scale and rotary == s.query_temperature_of_rotary:
        query = query * temperature(s, seq.positions)[:, :, None, None]
    bias = None
    if s.position_embedding_type == "alibi":  # -m (distance), Press et al. 2022, section 3
        distance = (seq.positions[:, :, None] - seq.positions[:, None, :]).double()
        bias = -slopes(s.num_attention_heads)[None, :, None, None] * distance[:, None]
    sinks = None
    if s.softmax_type == "off-by-one":
        sinks = torch.zeros(s.num_attention_heads, dtype=torch.float64)
    elif s.softmax_type == "learnable":
        sinks = w["softmax_offset"]
    seen = visible(s, seq, layer, rotary)
    out = attend(s, query, key, value, seen, softmax_scale(s, d), bias=bias, sinks=sinks, drop=drop)
    if gates:
        out = out * torch.sigmoid(gate)
    return linear(out, w, "linear_proj", bias=not s.disable_bias_linear or s.add_attention_output_bias)


def softmax_scale(s: SimpleNamespace, d: int) -> float:
    """1 / sqrt(d); with muP sqrt(d of the base model) / d^power (Yang et al. 2022, definition 4.1)."""
    if s.softmax_scale:
        return s.softmax_scale
    return math.sqrt(s.mup_base_head_dim or 1.0) / d**s.mup_attn_scale_power if s.use_mup else 1 / math.sqrt(d)


def latent(s: SimpleNamespace, x: Tensor, w: Weights, seq: Sequences, layer: int, drop=None) -> Tensor:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, equations 9 to 19).

    c_q = norm(W_dq x); q = [W_uq c_q; R(W_qr c_q)]; [c; k_r] = W_dkv x; k = [W_uk norm(c); R(k_r)]; v = W_uv norm(c).
    """
    heads, plain, turned = s.num_attention_heads, s.qk_head_dim, s.qk_pos_emb_head_dim
    eps = s.latent_norm_epsilon

    def normed(latent: Tensor, name: str) -> Tensor:
        return norm(s, latent, under(w, name), eps) if s.qk_layernorm else latent

    if s.q_lora_rank is None:
        query = linear(x, w, "linear_q_proj", bias=False)
    else:
        c_q = normed(linear(x, w, "linear_q_down_proj", bias=False), "q_layernorm")
        query = linear(c_q, w, "linear_q_up_proj", bias=False)
    query = query.view(*x.shape[:2], heads, plain + turned)
    down = linear(x, w, "linear_kv_down_proj", bias=False)
    c, key_turned = down[..., : s.kv_lora_rank], down[..., s.kv_lora_rank :]
    up = linear(normed(c, "kv_layernorm"), w, "linear_kv_up_proj", bias=False)
    up = up.view(*x.shape[:2], heads, plain + s.v_head_dim)
    key_turned = key_turned[:, :, None]
    query_turned = query[..., plain:]
    if not in_pattern(s.no_rope_freq, layer, s.num_layers):
        theta, factor = frequencies(s, turned, seq.longest)
        query_turned, key_turned = (
            rotate(y, seq.positions, theta, factor, adjacent=True) for y in (query_turned, key_turned)
        )
    query = torch.cat([query[..., :plain], query_turned], -1)
    key = torch.cat([up[..., :plain], key_turned.expand(-1, -1, heads, -1)], -1)
    scale = s.softmax_scale or 1 / math.sqrt(plain + turned)
    if s.softmax_scale is None and s.use_rope_scaling and s.rope_scaling_type == "yarn":
        scale = scale * yarn_m(s, s.mscale_all_dim) ** 2  # DeepSeek-V2's code
    out = attend(s, query, key, up[..., plain:], visible(s, seq, layer, rotary=True), scale, drop=drop)
    return linear(out, w, "linear_proj", bias=not s.disable_bias_linear)
