"""The language model: embedding, layers, output layer, and layers that predict later tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.plain.attention import Sequences, grouped_query, latent
from tests.plain.experts import Collected, mixture
from tests.plain.mlp import mlp
from tests.plain.norms import Weights, hidden_norm, under

Dropout = Callable[[str, Tensor, int], Tensor]
"""(name of the mask, tensor ``[b, t, ...]``, head) -> the tensor after dropout."""


def keep_all(name: str, x: Tensor, head: int = 0) -> Tensor:
    """No dropout."""
    return x


def has_experts(s: SimpleNamespace, layer: int) -> bool:
    """Whether a layer has experts; multi-token layers are like the last one."""
    layer, pattern = min(layer, s.num_layers - 1), s.moe_layer_freq
    if s.num_experts is None:
        return False
    return layer % pattern[0] == 0 if len(pattern) == 1 else pattern[layer] == 1


def transformer_layer(
    s: SimpleNamespace,
    x: Tensor,
    w: Weights,
    seq: Sequences,
    collected: Collected,
    layer: int,
    drop: Dropout = keep_all,
    repeat: tuple[int, int] = (0, 1),
) -> Tensor:
    """x + attention(norm(x)), then the same with the MLP (Radford et al. 2019, section 2.3).

    post: norms of outputs (OLMo 2); sandwich: of both (Gemma 2, section 2). Parallel: attention and MLP of the same x
    (Wang and Komatsuzaki 2021). A pattern of letters has layers of attention (*) or of an MLP (-) or experts (E) alone.
    ``repeat``: the number of this application of the layer in the step, and of all.
    """
    letter = "*E" if has_experts(s, layer) else "*-"
    if s.hybrid_layer_pattern:
        letter = s.hybrid_layer_pattern[layer] if layer < s.num_layers else s.mtp_layer_pattern

    def before(name: str, y: Tensor) -> Tensor:
        return y if s.norm_placement == "post" else hidden_norm(s, y, under(w, name))

    def after(name: str, y: Tensor) -> Tensor:
        return y if s.norm_placement == "pre" else hidden_norm(s, y, under(w, name))

    def attention(y: Tensor) -> Tensor:
        kind = latent if s.multi_latent_attention else grouped_query

        def of_weights(weights: Tensor, head: int) -> Tensor:
            return drop(f"layers.{layer}.attention_weights", weights, head)

        out = kind(s, y, under(w, "self_attention"), seq, layer, of_weights)
        return s.residual_multiplier * after("post_self_attn_layernorm", out)

    def drop_attention(y: Tensor) -> Tensor:
        return drop(f"layers.{layer}.attention", y, 0)

    def drop_mlp(y: Tensor) -> Tensor:
        return drop(f"layers.{layer}.mlp", y, 0)

    def feed_forward(y: Tensor) -> Tensor:
        inner = under(w, "mlp")
        if "E" in letter:

            def noise(kind: str, z: Tensor) -> Tensor:
                return drop(f"{kind}:layers.{layer}.router", z, 0)

            out = mixture(s, y, inner, collected, layer + repeat[0], repeat[1], noise)
        else:
            out = mlp(s, y, inner)
        return s.residual_multiplier * after("post_mlp_layernorm", out)

    if s.enable_mhc_connections:
        for name, sublayer, norm, dropped in (
            ("self_attention", attention, "input_layernorm", drop_attention),
            ("mlp", feed_forward, "pre_mlp_layernorm", drop_mlp),
        ):
            read, write, mix = connection(s, x, under(w, f"{name}_hyper_connection"))
            out = sublayer(before(norm, (read[..., None] * x).sum(-2)))
            x = mix @ x + dropped((write[..., None] * out[..., None, :]).flatten(-2)).unflatten(-1, x.shape[-2:])
        return x
    if s.parallel_residual:
        first = before("input_layernorm", x)
        second = first if s.parallel_residual_shared_norm else before("pre_mlp_layernorm", x)
        return x + drop_attention(attention(first)) + drop_mlp(feed_forward(second))
    if "*" in letter:
        x = x + drop_attention(attention(before("input_layernorm", x)))
    return x + drop_mlp(feed_forward(before("pre_mlp_layernorm", x))) if letter != "*" else x


def connection(s: SimpleNamespace, x: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of n streams x ``[b, t, n, h]``: to read ``[b, t, n]``, to write ``[b, t, n]``, and to mix
    ``[b, t, n, n]`` (Xie et al. 2025, arXiv 2512.24880, equations 5 to 9)."""
    n = s.mhc_num_residual_streams
    flat = x.flatten(-2)
    z = flat @ w["mapping_proj.weight"].T / (flat.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)
    b = w["bias"]
    read = torch.sigmoid(w["alpha_pre"] * z[..., :n] + b[:n])
    write = 2 * torch.sigmoid(w["alpha_post"] * z[..., n : 2 * n] + b[n : 2 * n])
    mix = torch.exp(w["alpha_res"] * z[..., 2 * n :] + b[2 * n :]).unflatten(-1, (n, n))
    for _ in range(s.mhc_sinkhorn_iterations):
        mix = mix / mix.sum(-1, keepdim=True)
        mix = mix / mix.sum(-2, keepdim=True)
    return read, write, mix


def embedded(s: SimpleNamespace, w: Weights, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Word embeddings, times sqrt(h) (Vaswani et al. 2017, section 3.4), plus learned positions, times a factor."""
    x = w["embedding.word_embeddings.weight"][tokens]
    if s.scale_embeddings:
        x = x * s.hidden_size**0.5
    if s.position_embedding_type == "learned_absolute" and positions is not None:
        table = w["embedding.position_embeddings.weight"]
        assert len(table) == (s.max_position_embeddings or s.seq_length)
        x = x + table[positions]
    return x * s.embedding_multiplier * (s.mup_embedding_mult if s.use_mup else 1.0)


def logits_of(s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    """The output layer; with muP its input is divided by width / base width (Yang et al. 2022, table 8)."""
    name = "output_layer" if s.untie_embeddings_and_output_weights else "embedding.word_embeddings"
    factor = s.logit_multiplier
    if s.use_mup:
        width = s.hidden_size / (s.mup_base_hidden_size or s.hidden_size)
        factor = factor * (s.mup_output_mult if s.mup_output_mult != 1.0 else 1 / width)
    logits = (factor * x) @ w[f"{name}.weight"].T
    if s.add_output_layer_bias:
        logits = logits + w["output_layer.bias"]
    cap = s.final_logit_softcapping
    return cap * torch.tanh(logits / cap) if cap else logits


def hidden_states(
    s: SimpleNamespace, w: Weights, tokens: Tensor, seq: Sequences, collected: Collected, drop: Dropout = keep_all
) -> Tensor:
    """The normalized output of the last layer, ``[b, t, h]``."""
    x = embedded(s, w, tokens, seq.positions)
    if s.embedding_layernorm:
        x = hidden_norm(s, x, under(w, "embedding.norm"))
    x = drop("embedding", x, 0)
    if s.enable_mhc_connections:
        x = torch.stack([x] * s.mhc_num_residual_streams, dim=-2)
    for layer in range(s.num_layers):
        x = transformer_layer(s, x, under(w, f"decoder.layers.{layer}"), seq, collected, layer, drop)
    if s.enable_mhc_connections:
        x = x.mean(-2)
    return hidden_norm(s, x, under(w, "decoder.final_layernorm"))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """log sum_v exp(z_v) - z_label of each token."""
    return logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]


def objective(
    s: SimpleNamespace, w: Weights, batch: dict[str, Tensor], seq: Sequences, micro: int, drop: Dropout = keep_all
) -> tuple[Tensor, Tensor, Collected]:
    """The loss (mean over the counted tokens), the sum that is minimised, and the values of the layers.

    ``batch``: tokens, labels and mask ``[b, t]`` of the global batch; ``micro``: sequences of a micro-batch.
    """
    mask, labels = batch["mask"], batch["labels"]
    collected = Collected(mask, micro)
    hidden = hidden_states(s, w, batch["tokens"], seq, collected, drop)
    logits = logits_of(s, w, hidden)
    number = mask.sum().clamp(min=1)
    losses = cross_entropy(logits, labels) * mask
    loss = losses.sum() / number
    minimised = loss
    if not s.calculate_per_token_loss:
        micros = zip(losses.split(micro), mask.split(micro), strict=True)
        means = [part.sum() / counted.sum().clamp(min=1) for part, counted in micros]
        minimised = torch.stack(means).mean()
    if s.output_z_loss_coeff:  # PaLM (Chowdhery et al. 2022), section 5
        z = (logits.logsumexp(-1) ** 2 * mask).sum() / number
        collected.add("output_z_loss", z, s.output_z_loss_coeff)
    if s.mtp_num_layers:
        later_tokens(s, w, hidden, labels, seq, collected, drop)
    return loss, minimised + sum(collected.objective), collected


def later_tokens(
    s: SimpleNamespace,
    w: Weights,
    hidden: Tensor,
    labels: Tensor,
    seq: Sequences,
    collected: Collected,
    drop: Dropout = keep_all,
) -> None:
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, equations 21 to 25).

    h_k = layer(M [norm(E t_{i+k}); norm(h_{k-1})]) predicts t_{i+k+1}; the losses of all depths are averaged over the
    tokens that count at that place, in the same document, and added with weight lambda / D.
    """
    depths, t = s.mtp_num_layers, labels.shape[1]
    outputs: list[Tensor] = []
    for k in range(1, depths + 1):
        built = 0 if s.mtp_use_repeated_layer else k - 1
        own = under(w, f"mtp.layers.{built}")
        inputs = torch.zeros_like(labels)
        inputs[:, : t - k + 1] = labels[:, k - 1 :]
        if s.mtp_zero_last_input:  # Megatron Core's roll_tensor
            inputs[:, t - k] = 0
        x = embedded(s, w, inputs, None)
        x = drop(f"mtp.{built}.embedding", x, 0)
        outputs.append(hidden)
        if s.mtp_hsm and k > 1:
            hidden = mixed(outputs, seq.documents, drop(f"mixing:mtp.{k - 1}", hidden[..., :1], 0))
        both = torch.cat([hidden_norm(s, x, under(own, "enorm")), hidden_norm(s, hidden, under(own, "hnorm"))], -1)
        repeat = (k - 1, depths) if s.mtp_use_repeated_layer else (0, 1)
        layer = s.num_layers + built
        hidden = transformer_layer(
            s, both @ own["eh_proj.weight"].T, under(own, "mtp_model_layer"), seq, collected, layer, drop, repeat
        )
        hidden = hidden_norm(s, hidden, under(own, "final_layernorm"))
        targets, counts = torch.zeros_like(labels), torch.zeros_like(collected.mask)
        targets[:, : t - k] = labels[:, k:]
        same = seq.documents[:, k:] == seq.documents[:, :-k]
        counts[:, : t - k] = collected.mask[:, k:] * same
        losses = cross_entropy(logits_of(s, w, hidden), targets)
        value = (losses * counts).sum() / counts.sum().clamp(min=1)
        collected.add(f"mtp_{k}_loss", value, s.mtp_loss_scaling_factor / depths)


def mixed(outputs: list[Tensor], documents: Tensor, drawn: Tensor) -> Tensor:
    """Hidden state mixing: each token has the output of a depth drawn from U(0, 1), ``[b, t, 1]``, at the position from
    which this depth predicts the same token, or the last output if this position is not in the same document."""
    result = outputs[-1].clone()
    for row, numbers in enumerate((drawn[..., 0] * len(outputs)).long().tolist()):
        for i, number in enumerate(numbers):
            place = i + len(outputs) - 1 - number
            if place < len(numbers) and documents[row, place] == documents[row, i]:
                result[row, i] = outputs[number][row, place]
    return result
