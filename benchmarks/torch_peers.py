"""Training steps of the same models with plain torch, `transformers` and DeepSpeed, for ``bench_peers``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

Shape = dict[str, Any]
Step = Callable[[], object]
REFERENCE = Path(sys.prefix).resolve() / "reference"
"""The folder into which ``make install-test`` installs DeepSpeed."""


class Layer(nn.Module):
    """A layer of a GPT-2 (Radford et al. 2019, section 2.3) on ``[b, s, h]``, without dropout."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each with its norm and residual."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class TorchGPT(nn.Module):
    """A stage of a GPT-2 of torch's modules: ``first`` embeds tokens ``[b, s]``, ``last`` returns logits."""

    def __init__(self, shape: Shape, layers: int, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        size, words = shape["hidden_size"], shape["vocab_size"]
        self.words = nn.Embedding(words, size) if first else None
        self.positions = nn.Embedding(shape["seq_length"], size) if first else None
        self.layers = nn.ModuleList(Layer(size, shape["num_attention_heads"]) for _ in range(layers))
        self.norm = nn.LayerNorm(size) if last else None
        self.head = nn.Linear(size, words, bias=False) if last else None
        if first and last and not shape.get("untie_embeddings_and_output_weights"):
            self.head.weight = self.words.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[b, s]`` or hidden states -> hidden states or logits ``[b, s, v]``."""
        if self.words is not None:
            x = self.words(x) + self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a micro-batch."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches_of(shape: Shape, count: int) -> list[Tensor]:
    """Random tokens of each micro-batch."""
    return [
        torch.randint(0, shape["vocab_size"], (shape["micro_batch_size"], shape["seq_length"])) for _ in range(count)
    ]


def torch_step(kind: str, shape: Shape, micro_batches: int) -> Step:
    """``torch``, ``DDP``, ``ZeRO-1`` (torch's ZeroRedundancyOptimizer) or ``FSDP2`` with a GPT-2 and fused AdamW.

    DDP synchronizes once per step; FSDP2 reduces gradients of each micro-batch and frees weights after forward.
    """
    model: nn.Module = TorchGPT(shape, shape["num_layers"])
    if kind == "FSDP2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif kind != "torch":
        model = nn.parallel.DistributedDataParallel(model)
    fused = {"lr": 1e-3, "fused": True}
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **fused)
        if kind == "ZeRO-1"
        else torch.optim.AdamW(model.parameters(), **fused)
    )
    return accumulating_step(
        model, optimizer, batches_of(shape, micro_batches), lambda batch: cross_entropy(model(batch), batch)
    )


def accumulating_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], loss: Callable[[Tensor], Tensor]
) -> Step:
    """A step of several micro-batches with clipping."""

    def step() -> None:
        for batch in batches:
            quiet = batch is not batches[-1] and isinstance(model, nn.parallel.DistributedDataParallel)
            with model.no_sync() if quiet else nullcontext():
                (loss(batch) / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def pipeline_step(shape: Shape, micro_batches: int) -> Step:
    """1F1B of torch.distributed.pipelining, with the layers divided equally; clips by the norm over all stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == ranks - 1
    model = TorchGPT(shape, shape["num_layers"] // ranks, first=first, last=last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=cross_entropy)
    batch = torch.cat(batches_of(shape, micro_batches))

    def step() -> None:
        schedule.step(*((batch,) if first else ()), **({"target": batch} if last else {}))
        squares = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def transformers_step(kind: str, shape: Shape, micro_batches: int) -> Step:
    """`transformers`' Llama or GPT-2 with torch's fused AdamW, under DDP on several ranks."""
    model: nn.Module = llama(shape) if "swiglu" in shape else gpt2(shape)
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return accumulating_step(
        model, optimizer, batches_of(shape, micro_batches), lambda batch: model(input_ids=batch, labels=batch).loss
    )


def gpt2(shape: Shape) -> nn.Module:
    """`transformers`' GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=shape["vocab_size"],
        n_positions=shape["seq_length"],
        n_embd=shape["hidden_size"],
        n_layer=shape["num_layers"],
        n_head=shape["num_attention_heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config)


def llama(shape: Shape) -> nn.Module:
    """`transformers`' Llama."""
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["seq_length"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["ffn_hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_attention_heads"],
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def deepspeed_step(kind: str, shape: Shape, micro_batches: int) -> Step:
    """DeepSpeed's ZeRO stage ``kind`` with the GPT-2 of torch's modules and torch's fused AdamW."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": rank, "RANK": rank}
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    sys.path.insert(0, str(REFERENCE))
    import deepspeed  # not before its folder is on the path

    config = {
        "train_micro_batch_size_per_gpu": shape["micro_batch_size"],
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(kind), "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    model = TorchGPT(shape, shape["num_layers"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = batches_of(shape, micro_batches)

    def step() -> None:
        for batch in batches:
            engine.backward(cross_entropy(engine(batch), batch))
            engine.step()

    return step
