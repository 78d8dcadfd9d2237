"""Attention modules as users write them: where each has its number of heads, and how it divides its channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megatron_core import LayerSpec, PipelineModule

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Causal attention with separate projections; subclasses divide channels into heads."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        keys = WIDTH // HEADS * self.kv_heads
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.set_heads()

    def set_heads(self) -> None:
        """Store the number of heads."""
        self.heads = HEADS

    def divide(self, x: Tensor) -> Tensor:
        """``[b, s, w]`` -> ``[b, s, heads, channels]``."""
        return x.unflatten(-1, (self.heads, -1))

    def repeat(self, x: Tensor) -> Tensor:
        """Keys or values for every query head."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """``[b, s, heads, channels]`` -> ``[b, s, w]``."""
        return x.flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, w]`` -> ``[b, s, w]``."""
        q, k, v = (self.divide(each).transpose(1, 2) for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        y = scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        out: Tensor = self.o_proj(self.join(y.transpose(1, 2)))
        return out


class NumHeads(Attention):
    def set_heads(self) -> None:
        self.num_heads = HEADS

    def divide(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        return x.view(b, s, self.num_heads, -1)


class NHead(Attention):
    """As nanoGPT, with sizes of the split tensor."""

    def set_heads(self) -> None:
        self.n_head = HEADS

    def divide(self, x: Tensor) -> Tensor:
        b, s, c = x.size()
        return x.reshape(b, s, self.n_head, c // self.n_head)


class Nhead(Attention):
    """As torch's layers, which keep the width as well."""

    def set_heads(self) -> None:
        self.nhead, self.d_model = HEADS, WIDTH

    def divide(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.nhead, self.d_model // self.nhead)

    def join(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.d_model)


class UnknownName(Attention):
    def set_heads(self) -> None:
        self.h, self.dropout_layers = HEADS, 2

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.h, -1))


class WidthOfHead(Attention):
    """The number of heads follows from the channels of one head."""

    def set_heads(self) -> None:
        self.d = WIDTH // HEADS

    def divide(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, self.d)


class WidthByDivision(Attention):
    """Channels of a head are the whole width divided by the number of all heads: neither may change."""

    def set_heads(self) -> None:
        self.heads, self.dim = HEADS, WIDTH

    def divide(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.dim // self.heads)


class Constant(Attention):
    def set_heads(self) -> None:
        pass

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 8))


class Einops(Attention):
    """``rearrange(x, "b s (h d) -> b h s d", h=self.heads)`` and a product by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).reshape(b, s, self.heads, -1) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        y = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        out: Tensor = self.o_proj(y.reshape(b, s, -1))
        return out


class Convolved(Attention):
    """A convolution before the projections, as in SegFormer: the memory format of its gradient is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(WIDTH, WIDTH, (1, 3), padding="same")

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, w]`` -> ``[b, s, w]``."""
        return super().forward(self.reduce(x.transpose(1, 2).unsqueeze(2)).flatten(2).transpose(1, 2))


class Grouped(Attention):
    """Fewer key and value heads, under a name of its own."""

    kv_heads = 2

    def set_heads(self) -> None:
        self.heads, self.kv_heads = HEADS, 2

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        groups = self.heads // self.kv_heads
        y = scaled_dot_product_attention(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class OneKey(Grouped):
    """One key and value head, shared by the ranks."""

    kv_heads = 1

    def set_heads(self) -> None:
        self.heads, self.kv_heads = HEADS, 1


class ApartCore(Attention):
    """The heads are counted by a module without weights."""

    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = HEADS

        def forward(self, *projected: Tensor) -> Tensor:
            q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projected)
            return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def set_heads(self) -> None:
        self.core = self.Core()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o_proj(self.core(self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        return out


class ReturnsWeights(Attention):
    """Also returns the attention weights of its heads."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.divide(p(x)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class ReadsAttention(nn.Module):
    """Reads the attention weights of all heads, which a rank does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ReturnsWeights()

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.inner(x)
        out: Tensor = y + (weights * torch.arange(1, HEADS + 1)[:, None, None]).mean((1, 2)).unsqueeze(-1)
        return out


class FusedQKV(nn.Module):
    """One projection to queries, keys and values, of GPT-2's name."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.c_attn(x).chunk(3, -1))
        out: Tensor = self.c_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class FusedAttributes(FusedQKV):
    """Queries, keys and values are split by an attribute with the width."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (each.view(b, s, self.heads, -1).transpose(1, 2) for each in self.c_attn(x).split(self.n_embd, 2))
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, self.n_embd)
        out: Tensor = self.c_proj(y)
        return out


class WithTorchAttention(nn.Module):
    """``nn.MultiheadAttention`` reads the weights of its projections itself: it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.self_attn(x, x, x, need_weights=False)[0]
        return out


class TwoUnknownNames(Grouped):
    """Numbers of heads under two names that only the caller knows."""

    def set_heads(self) -> None:
        self.hq, self.hk = HEADS, 2

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.hq, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.hk, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(self.hq // self.hk, 1) for each in (k, v))
        out: Tensor = self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class TwoEqualNames(Attention):
    """The number of heads under one unknown name for queries, and another one for keys and values."""

    def set_heads(self) -> None:
        self.hq = self.hk = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.hq, -1)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (self.hk, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class UnknownProjection(nn.Module):
    """A fused projection with a name for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o_proj, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        out: Tensor = self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


# Modules whose split would compute something else.


class LiteralHeads(Attention):
    """The number of heads is in the code alone."""

    def set_heads(self) -> None:
        pass

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, -1))


class HeadsInConfig(Attention):
    """The number of heads is in an object that modules share."""

    def set_heads(self) -> None:
        self.config = {"heads": HEADS}

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config["heads"], -1))


class WidthOfInput(FusedQKV):
    """As nanoGPT: the width of the input, which is whole, divides the split channels."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (each.view(b, s, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
        out: Tensor = self.c_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, c))
        return out


class InnerHeads(Attention):
    """Heads are the inner dim of the channels: a rank has channels of all heads."""

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.heads)).transpose(-1, -2)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2).flatten(2)


class NormOfKeys(Attention):
    """The norm is whole on each rank, and each computes a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def divide(self, x: Tensor) -> Tensor:
        return self.norm(super().divide(x))  # type: ignore[no-any-return]


class Temperature(Attention):
    """A parameter of the attention itself, of whose gradient each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def divide(self, x: Tensor) -> Tensor:
        return super().divide(x) * self.temperature


class BiasOfHeads(Attention):
    """A parameter with an entry for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(HEADS, 1))

    def divide(self, x: Tensor) -> Tensor:
        return super().divide(x) + self.bias


class NormOfAll(Attention):
    """Mean and variance over channels of all heads."""

    def join(self, x: Tensor) -> Tensor:
        y = x.flatten(2)
        return (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-5).sqrt()


class InterleavedQKV(FusedQKV):
    """The fused projection has queries, keys and values of each head together."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (self.heads, 3, -1)).transpose(1, 2).unbind(3)
        out: Tensor = self.c_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    """A fused gate under the name of a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(gate.sigmoid() * up)
        return out


class ReadsWeights(nn.Module):
    """The second product is not a call of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.fc1(x).tanh(), self.fc2.weight)


class WrongScale(Attention):
    """Divided heads would change the scale, not the shapes."""

    def set_heads(self) -> None:
        self.heads, self.model_width = HEADS, float(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = (self.model_width / self.heads) ** -0.5
        out: Tensor = self.o_proj(scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """A feed-forward part whose split is right."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x).tanh())
        return out


class Masked(nn.Module):
    """Passes the arguments that only the first forward knows."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.inner = type(f"Masked{kind.__name__}", (_NeedsMask, kind), {})()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, mask=torch.ones(x.shape[1], dtype=torch.bool))
        return out


class _NeedsMask(nn.Module):
    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        y: Tensor = super().forward(x * mask[:, None])
        return y


class Silent(Masked):
    """Gives zeros to its module at first, which would not show a wrong number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x * 0.0)


class Model(nn.Module):
    """Residual layers of these kinds between an embedding and a loss."""

    def __init__(self, *kinds: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": kind(), "mlp": MLP()}) for kind in kinds)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in kinds)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting the next token."""
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer["attn"](norm(x))
            x = x + layer["mlp"](x)
        return loss_of_next(self.head(x), tokens)


class Block(nn.Module):
    """A residual layer whose attention is known in its first forward only."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Masked(kind), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        out: Tensor = x + self.mlp(x)
        return out


def loss_of_next(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of predicting the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Chain(nn.Module):
    """Layers that a pipeline can cut into stages."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return loss_of_next(self.head(x), tokens)


def pipeline_of(kind: type[Attention]) -> PipelineModule:
    """The same as a list of layers."""
    blocks = [LayerSpec(Block, kind) for _ in range(2)]
    layers = [LayerSpec(nn.Embedding, 11, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, 11)]
    return PipelineModule(layers, loss_fn=loss_of_next)


def pipeline_with_a_whole_stage() -> PipelineModule:
    """The second of two stages has no layer that is split."""
    layers = [LayerSpec(nn.Embedding, 11, WIDTH), LayerSpec(Block, Attention)]
    layers += [LayerSpec(nn.LayerNorm, WIDTH), LayerSpec(nn.Linear, WIDTH, 11)]
    return PipelineModule(layers, loss_fn=loss_of_next, partition_method=[2, 2])
