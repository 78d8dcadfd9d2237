"""Compare a layer of experts, forward and backward, with `transformers`' Mixtral block with the same weights and
tokens.

With ``--megatron FOLDER``, a checkout of NVIDIA/Megatron-LM, also with Megatron Core's layer.

One process, one thread; contenders alternate, and medians over all rounds are compared. Gradients of the weights are
accumulated, as in training with several micro-batches. `transformers` runs in two of its implementations: a loop over
experts (eager) and one grouped product (grouped_mm, its default). Prints a table and appends it to
benchmarks/results.csv.

python -m benchmarks.bench_moe
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.megatron_moe import megatron_layer
from benchmarks.results import Row, append
from megatron_core.config import ModelConfig
from megatron_core.features.experts.layer import MoELayer
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext

THEIRS = ("eager", "grouped_mm")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time a layer of experts."""

    hidden_size: int = 512
    """Width of the tokens."""
    ffn_hidden_size: int = 1024
    """Width of each expert."""
    num_experts: int = 8
    """Number of experts."""
    topk: int = 2
    """Experts per token."""
    tokens: int = 1024
    """Tokens per pass."""
    rounds: int = 7
    """Timed passes of each contender, after one warm-up pass."""
    bf16: bool = False
    """Use bfloat16 instead of float32."""
    megatron: Path | None = None
    """A checkout of NVIDIA/Megatron-LM, to include its layer."""


def contenders(settings: Settings) -> dict[str, Callable[[Tensor], Tensor]]:
    """The forward pass of each contender; all have the same weights."""
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    model = ModelConfig(
        num_layers=1,
        hidden_size=settings.hidden_size,
        num_attention_heads=8,
        swiglu=True,
        disable_bias_linear=True,
        num_experts=settings.num_experts,
        moe_router_topk=settings.topk,
        moe_ffn_hidden_size=settings.ffn_hidden_size,
    )
    ours = MoELayer(LayerContext(model, ModelParallelConfig(params_dtype=dtype), LocalGroup(), 1), 0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # as in a bucket of data parallelism
    found: dict[str, Callable[[Tensor], Tensor]] = {"ours": lambda x: ours(x, SequenceContext())[0]}
    for implementation in THEIRS:
        config = transformers.MixtralConfig(
            hidden_size=settings.hidden_size, intermediate_size=settings.ffn_hidden_size,
            num_local_experts=settings.num_experts, num_experts_per_tok=settings.topk,
            experts_implementation=implementation,
        )  # fmt: skip
        block = MixtralSparseMoeBlock(config).to(dtype)
        with torch.no_grad():
            block.gate.weight.copy_(ours.router.weight)
            block.experts.gate_up_proj.copy_(ours.experts.linear_fc1.weight)
            block.experts.down_proj.copy_(ours.experts.linear_fc2.weight)
        found[f"transformers {implementation}"] = block
    if settings.megatron is not None:
        layer, name = megatron_layer(settings.megatron, ours, dtype)
        found[name] = lambda x: layer(x)[0]
    return found


def one_pass(forward: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Seconds and results: output and input gradient."""
    x = x.clone().requires_grad_()
    began = time.perf_counter()
    output = forward(x)
    output.backward(torch.ones_like(output))
    return time.perf_counter() - began, output.detach(), x.grad


def main(settings: Settings) -> int:
    """Measure, print and append; returns 1 if the contenders disagree."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    x = torch.randn(1, settings.tokens, settings.hidden_size).to(dtype)
    layers = contenders(settings)
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    results = {name: one_pass(layer, x)[1:] for name, layer in layers.items()}
    for name, found in results.items():
        for mine, other in zip(results["ours"], found, strict=True):
            if (mine - other).abs().max() > (0.1 if settings.bf16 else 1e-3) * mine.abs().max():
                print(f"{name} computes something else")
                return 1
    for _ in range(settings.rounds):
        for name, layer in layers.items():
            seconds[name].append(one_pass(layer, x)[0])
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"{settings.tokens} tokens, {settings.num_experts} experts of {settings.hidden_size} x "
          f"{settings.ffn_hidden_size}, {settings.topk} for each token, {dtype}, forward and backward")  # fmt: skip
    for name, median in medians.items():
        print(f"  {name:24} {settings.tokens / median:10,.0f} tokens/s  {median / medians['ours']:6.2f} x ours in time")
    rows = [
        Row(f"{name}{' bf16' * settings.bf16}", settings.tokens / median, "tokens/s", ratio=median / medians["ours"])
        for name, median in medians.items()
    ]
    append("bench_moe", rows, peer=f"transformers {transformers.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings)))
