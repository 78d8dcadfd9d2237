"""Compressed gradients of several ranks computed in one process, in float64, straight from the papers' algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.any_model.models import (
    BATCH,
    DECAY,
    STEPS,
    Result,
    call,
    loss_in,
    model_of,
    samples_of,
    throughout_float64,
    weights_of,
)

BETA1, BETA2, EPS, LR = 0.9, 0.999, 1e-2, 1e-3


@dataclass
class Layout:
    """A flat buffer: names, offsets and length; for PowerSGD the first right factor of each compressed matrix."""

    names: list[str]
    offsets: list[int]
    length: int
    factors: list[Tensor] = field(default_factory=list)


def signs(x: Tensor) -> Tensor:
    """Signs times the root mean square."""
    return torch.where(x >= 0, torch.ones_like(x), -1.0) * x.square().mean().sqrt()


class OneBit:
    """Tang et al. 2021, algorithm 1, for one buffer and all ranks."""

    def __init__(self, ranks: int, length: int) -> None:
        self.worker = torch.zeros(ranks, length, dtype=torch.float64)
        self.server = torch.zeros(ranks, length // ranks, dtype=torch.float64)

    def sum(self, messages: Tensor, mask: Tensor) -> Tensor:
        """The sum of ``messages`` ``[ranks, length]`` as every rank receives it."""
        messages = messages + self.worker
        sent = torch.stack([signs(message) for message in messages])
        self.worker = (messages - sent) * mask
        shares = sent.sum(0).view(self.server.shape) + self.server
        answers = torch.stack([signs(share) for share in shares])
        self.server = (shares - answers) * mask.view(self.server.shape)
        return answers.view(-1) * mask


class LowRank:
    """Vogels et al. 2019, algorithms 1 and 2, for one matrix and all ranks."""

    def __init__(self, factor: Tensor, ranks: int, shape: tuple[int, int]) -> None:
        self.factor, self.errors = factor, torch.zeros(ranks, *shape, dtype=torch.float64)

    def sum(self, matrices: Tensor) -> Tensor:
        """The approximate sum of ``matrices`` ``[ranks, rows, columns]``."""
        matrices = matrices + self.errors
        left = torch.linalg.qr((matrices @ self.factor).sum(0)).Q
        self.factor = (matrices.mT @ left).sum(0)
        total = left @ self.factor.mT
        self.errors = matrices - total / len(matrices)
        return total


def train(name: str, ranks: int, layouts: list[Layout], method: str, *, warmup: int, clip: float) -> Result:
    """Losses, norms of the decompressed gradients and weights."""
    model, samples = model_of(name).double(), samples_of(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = [[parameters[n].shape for n in layout.names] for layout in layouts]
    sizes = [layout.length for layout in layouts]
    moments = [torch.zeros(2, size, dtype=torch.float64) for size in sizes]
    onebit = [OneBit(ranks, size) for size in sizes]
    low_rank = [dict[int, LowRank]() for _ in layouts]
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        own = [torch.zeros(ranks, size, dtype=torch.float64) for size in sizes]
        total = 0.0
        for number, sample in enumerate(samples[(step - 1) * BATCH : step * BATCH]):
            with throughout_float64(model):
                loss = loss_in(call(model, torch.utils.data.default_collate([sample]))) / BATCH
                loss.backward()
            total += loss.item()
            for flats, layout in zip(own, layouts, strict=True):
                for n, at in zip(layout.names, layout.offsets, strict=True):
                    if parameters[n].grad is not None:
                        flats[number % ranks, at : at + parameters[n].numel()] += parameters[n].grad.flatten()
            model.zero_grad()
        grads = []
        for flats, moment, layout, bits, matrices, shape in zip(
            own, moments, layouts, onebit, low_rank, shapes, strict=True
        ):
            whole = flats.sum(0)
            if step > warmup and method == "onebit-adam":
                messages = BETA1 * moment[0] / ranks + (1.0 - BETA1) * flats
                whole = (bits.sum(messages, (moment[1] > 0).double()) - BETA1 * moment[0]) / (1.0 - BETA1)
            elif step > warmup:
                factors = list(layout.factors)
                for at, size in zip(layout.offsets, shape, strict=True):
                    rows, columns = size[0], size.numel() // size[0]
                    width = layout.factors[0].shape[1] if layout.factors else 0
                    if len(size) > 1 and width and 2 * width * (rows + columns) <= rows * columns:
                        first = factors.pop(0)
                        power = matrices.setdefault(at, LowRank(first, ranks, (rows, columns)))
                        part = slice(at, at + rows * columns)
                        whole[part] = power.sum(flats[:, part].view(ranks, rows, columns)).flatten()
            grads.append(whole)
        norms.append(torch.cat(grads).norm().item())
        factor = min(1.0, clip / (norms[-1] + 1e-6)) if clip else 1.0
        losses.append(total)
        frozen = method == "onebit-adam" and step > warmup
        for grad, moment, layout, shape in zip(grads, moments, layouts, shapes, strict=True):
            grad = grad * factor
            moment[0] = BETA1 * moment[0] + (1.0 - BETA1) * grad
            if not frozen:
                moment[1] = BETA2 * moment[1] + (1.0 - BETA2) * grad.square()
            denominator = (moment[1] / (1.0 - BETA2 ** (warmup if frozen else step))).sqrt() + EPS
            update = moment[0] / (1.0 - BETA1**step) / denominator
            for n, at, size in zip(layout.names, layout.offsets, shape, strict=True):
                weight = parameters[n].data
                weight.mul_(1.0 - LR * DECAY * (len(size) > 1))
                weight.sub_(LR * update[at : at + size.numel()].view(size))
    return {"losses": losses, "norms": norms, "weights": weights_of(model.state_dict(), model)}
