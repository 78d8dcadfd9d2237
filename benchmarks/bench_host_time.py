"""Processor time of a training step outside of kernels, compared with the same Llama in plain torch and transformers.

The kernels of this model cost almost nothing (8 layers, 32 channels, 8 tokens), so that time is that of Python, torch's
dispatcher and autograd: on a GPU, the time in which the host launches. The contenders take turns step by step in one
process on one thread, and each step is divided by plain torch's of the same round; medians of the rounds. ``layer`` is
the difference between 8 layers and 2, per layer. All contenders compute the loss, all gradients, the clipped norm and
AdamW with weights in float32. Appends its rows to benchmarks/results.csv.

python -m benchmarks.bench_host_time
python -m benchmarks.bench_host_time --profile 40   # the functions of our step with most processor time
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import tyro
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step

SHAPE: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "seq_length": 8,
    "vocab_size": 64, "ffn_hidden_size": 64, "micro_batch_size": 1, "global_batch_size": 1,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mock_data": True,
    "train_iters": 1_000_000, "lr": 1e-3, "lr_decay_style": "constant", "eval_iters": 0,
}  # fmt: skip
DEPTHS = (2, 8)
Step = Callable[[], object]


class Layer(nn.Module):
    """A layer of a Llama (Touvron et al. 2023) on ``[b, s, h]``."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        size, heads, groups = (shape[name] for name in ("hidden_size", "num_attention_heads", "num_query_groups"))
        self.heads, self.groups, self.channels = heads, groups, size // heads
        self.norms = nn.ModuleList(nn.RMSNorm(size, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(size, (heads + 2 * groups) * self.channels, bias=False)
        self.proj = nn.Linear(size, size, bias=False)
        self.up = nn.Linear(size, 2 * shape["ffn_hidden_size"], bias=False)
        self.down = nn.Linear(shape["ffn_hidden_size"], size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and MLP, each with its norm and residual."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.channels)).transpose(1, 2)
        query, key, value = heads.split((self.heads, self.groups, self.groups), dim=1)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        gate, other = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * other)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels, as transformers does."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Llama(nn.Module):
    """A Llama of torch's modules."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        size, words, length = (shape[name] for name in ("hidden_size", "vocab_size", "seq_length"))
        self.words = nn.Embedding(words, size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape["num_layers"]))
        self.norm = nn.RMSNorm(size, eps=1e-5)
        self.head = nn.Linear(size, words, bias=False)
        channels = size // shape["num_attention_heads"]
        rates = 10000.0 ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[b, s]`` -> logits ``[b, s, v]``."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def torch_step(
    model: nn.Module, loss_of: Callable[[Tensor], Tensor], shape: dict[str, Any], dtype: torch.dtype
) -> Step:
    """A step of torch's AdamW; with 16 bits the weights that it updates are copies in float32."""
    model.to(dtype)
    weights = list(model.parameters())
    wide = weights if dtype == torch.float32 else [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(wide, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01, foreach=True)
    tokens = torch.randint(0, shape["vocab_size"], (shape["micro_batch_size"], shape["seq_length"] + 1))

    def step() -> float:
        loss = loss_of(tokens)
        loss.backward()
        if wide is not weights:
            for master, weight in zip(wide, weights, strict=True):
                master.grad = weight.grad.float()
                weight.grad = None
        nn.utils.clip_grad_norm_(wide, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if wide is not weights:
            with torch.no_grad():
                torch._foreach_copy_(weights, wide)
        return loss.item()

    return step


def plain(shape: dict[str, Any], dtype: torch.dtype) -> Step:
    """Plain torch."""
    model = Llama(shape)

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return torch_step(model, loss_of, shape, dtype)


def of_transformers(shape: dict[str, Any], dtype: torch.dtype) -> Step:
    """transformers' Llama."""
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["ffn_hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_query_groups"],
        max_position_embeddings=64,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return torch_step(model, loss_of, shape, dtype)


def ours(shape: dict[str, Any], dtype: torch.dtype) -> Step:
    """This framework, without a launcher."""
    settings = shape | {"bf16": dtype == torch.bfloat16}
    run = set_up(RunConfig.from_flat(settings), World(0, 1, 0, torch.device("cpu")))
    return lambda: train_step(run)


CONTENDERS = {"ours": ours, "plain torch": plain, "transformers": of_transformers}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the processor time of a step outside of kernels."""

    rounds: int = 60
    """Rounds; in each, every contender makes ``steps`` steps."""
    steps: int = 3
    profile: int = 0
    """Print this number of functions of our step with most time of their own, and end."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    keep: bool = True
    """Append the rows to results.csv."""


def in_turns(steps: dict[tuple[str, int], Step], settings: Settings) -> list[dict[tuple[str, int], float]]:
    """Processor seconds of a step, by round and contender."""
    for step in steps.values():
        for _ in range(5):
            step()
    gc.collect()
    rounds = []
    for number in range(settings.rounds):
        seconds = {}
        order = list(steps.items())
        for key, step in order if number % 2 else reversed(order):
            began = time.process_time()
            for _ in range(settings.steps):
                step()
            seconds[key] = (time.process_time() - began) / settings.steps
        rounds.append(seconds)
    return rounds


def rows_of(dtype: str, rounds: list[dict[tuple[str, int], float]]) -> list[Row]:
    """A row for each contender's step and layer."""
    shallow, deep = DEPTHS
    rows = []
    for name in CONTENDERS:
        step = [seconds[name, deep] for seconds in rounds]
        ratio = [seconds[name, deep] / seconds["plain torch", deep] for seconds in rounds]
        layer, reference = (
            statistics.median((seconds[who, deep] - seconds[who, shallow]) / (deep - shallow) for seconds in rounds)
            for who in (name, "plain torch")
        )
        rows.append(Row(f"{dtype} {name}, step", statistics.median(step), "s", ratio=statistics.median(ratio)))
        rows.append(Row(f"{dtype} {name}, layer", layer, "s", ratio=layer / reference))
    return rows


def profile(dtype: torch.dtype, settings: Settings) -> None:
    """Print the functions of our step with most time."""
    step = ours(SHAPE, dtype)
    for _ in range(5):
        step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(settings.rounds):
        step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(settings.profile)


def main(settings: Settings) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    rows = []
    for dtype in settings.dtypes:
        if settings.profile:
            profile(getattr(torch, dtype), settings)
            continue
        steps = {
            (name, depth): make(SHAPE | {"num_layers": depth}, getattr(torch, dtype))
            for name, make in CONTENDERS.items()
            for depth in DEPTHS
        }
        found = rows_of(dtype, in_turns(steps, settings))
        for row in found:
            print(f"{row.contender:36} {1e6 * row.value:9.0f} us {row.ratio:7.3f}", flush=True)
        rows += found
    if settings.keep and rows:
        append("bench_host_time", rows, peer=f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
