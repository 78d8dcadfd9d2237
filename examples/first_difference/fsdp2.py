"""FSDP2 and DTensor: a step with a public bug, compared with the same step on one rank.

``shared_key``: torchtitan issue 1373, in which the shared key of multi-head latent attention gets the gradient of its
own rank's heads only, because ``to_local`` declares a partial gradient as whole. ``mean_of_means``: each rank divides
by its own number of tokens (transformers issue 34242, verl issue 4250). ``chunked_loss``: torchtitan pull request 3412;
the gradients of a loss in chunks are partial sums over the ranks of a split output layer, and declared whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_core.verify import compare

HEADS, WIDTH, VOCABULARY = 4, 16, 32


class SharedKeyAttention(nn.Module):
    """Queries of several heads over one shared key; the heads are split over the ranks of ``mesh``."""

    def __init__(self, mesh: DeviceMesh, bug: str) -> None:
        super().__init__()
        self.queries, self.output = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH // HEADS, bias=False)
        parallelize_module(self.queries, mesh, ColwiseParallel())
        parallelize_module(self.output, mesh, RowwiseParallel())
        distribute_module(self.key, mesh)
        self._mesh, self._gradient = mesh, [Replicate()] if bug == "shared_key" else [Partial()]

    def forward(self, x: Tensor) -> Tensor:
        """Attention of ``x`` [b, s, h]; the key is also the value."""
        shared = DTensor.from_local(x, self._mesh, [Replicate()])
        key = self.key(shared).to_local(grad_placements=self._gradient)
        queries = self.queries(x).unflatten(-1, (-1, WIDTH // HEADS))
        weights = torch.einsum("bshd,btd->bhst", queries, key).softmax(-1)
        whole: Tensor = self.output(torch.einsum("bhst,btd->bshd", weights, key).flatten(-2))
        return whole


def split_heads(folder: str, bug: str = "") -> list[str]:
    """One step of attention whose heads are split by DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(SharedKeyAttention(mesh, bug), nn.LayerNorm(WIDTH)).double()
    watch = compare(model, folder, tp=(dist.get_rank(), dist.get_world_size()))
    torch.manual_seed(1)
    model(torch.randn(2, 5, WIDTH, dtype=torch.float64)).square().mean().backward()
    watch.gradients()
    return watch.finish()


def sharded(folder: str, bug: str = "") -> list[str]:
    """One step of a language model under FSDP2; each rank has half of the samples, of different lengths."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    ).double()
    fully_shard(model[1])
    fully_shard(model)
    watch = compare(model, folder, averaged=size, dp=(rank, size))
    torch.manual_seed(1)
    tokens, mask = torch.randint(VOCABULARY, (4, 6)), torch.ones(4, 6)
    mask[:2, 2:] = 0.0
    tokens, mask = (each.chunk(size)[rank] for each in (tokens, mask))
    count = mask.sum()
    if bug != "mean_of_means":
        dist.all_reduce(count)
        count /= size  # FSDP2 averages
    losses = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
    (losses * mask.flatten()).sum().div(count).backward()
    watch.gradients()
    return watch.finish()


class ChunkedLoss(nn.Module):
    """Logits of a split output layer in chunks of the sequence, whose gradients are added before the layers below."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        distribute_module(self.hidden, mesh)
        parallelize_module(self.output, mesh, ColwiseParallel(output_layouts=Replicate()))
        self._mesh = mesh

    def train_on(self, x: Tensor, tokens: Tensor, bug: str) -> None:
        """Backward of the cross entropy of ``tokens`` [s], for ``x`` [s, h]."""
        hidden = self.hidden(DTensor.from_local(x, self._mesh, [Replicate()]))
        collected: list[Tensor] = []
        placements = [Replicate()]
        for chunk, labels in zip(hidden.detach().chunk(2), tokens.chunk(2), strict=True):
            chunk.requires_grad_()
            nn.functional.cross_entropy(self.output(chunk), labels, reduction="sum").div(len(tokens)).backward()
            gradient = chunk.grad
            assert isinstance(gradient, DTensor)
            collected.append(gradient.to_local())
            placements = list(gradient.placements)
        declared = [Replicate()] if bug == "chunked_loss" else placements
        hidden.backward(DTensor.from_local(torch.cat(collected), self._mesh, declared))


def chunked_loss(folder: str, bug: str = "") -> list[str]:
    """One step of a model whose loss is computed in chunks under tensor parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = ChunkedLoss(mesh).double()
    watch = compare(model, folder, tp=(dist.get_rank(), dist.get_world_size()))
    torch.manual_seed(1)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    model.train_on(x, torch.randint(VOCABULARY, (6,)), bug)
    watch.gradients()
    return watch.finish()
