"""Models in which ranks use different modules, and programs that train them with torch or with engines.

A sample decides which modules run, so one process that trains on the samples of all ranks computes what the ranks must
compute together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import megatron_core
from tests.any_model.models import CLIP, COMMON, DECAY, LR

WIDTH, STEPS, MICRO_BATCHES = 6, 3, 2


@dataclass(frozen=True)
class Sample:
    """One sample: its values, and a number that chooses the modules."""

    x: Tensor
    number: int


def samples_of(step: int, ranks: int, rank: int | None = None) -> list[Sample]:
    """The samples of a step, those of one rank or of all; neighbouring numbers belong to different ranks."""
    numbers = range(step * MICRO_BATCHES * ranks, (step + 1) * MICRO_BATCHES * ranks)
    draws = {n: torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in numbers}
    return [Sample(draws[n], n) for n in numbers if rank is None or n % ranks == rank]


def block(outputs: int = WIDTH, inputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


class Awkward(nn.Module):
    """A list of layers and a head; subclasses choose the layers that a sample runs."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)

    def hidden(self, sample: Sample) -> Tensor:
        raise NotImplementedError

    def forward(self, sample: Sample) -> Tensor:
        """The loss."""
        return self.head(self.hidden(sample)).square().mean()


class LayerByRank(Awkward):
    """Rank r uses layer r."""

    def hidden(self, sample: Sample) -> Tensor:
        return self.layers[sample.number % len(self.layers)](sample.x)


class UnequalLayerByRank(LayerByRank):
    """Rank r uses layer r; their sizes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Sequential(block(13), block(WIDTH, 13))


class BranchByData(Awkward):
    """The values of a sample choose the layer."""

    def hidden(self, sample: Sample) -> Tensor:
        return self.layers[int(sample.x.sum() > 0)](sample.x)


class LayerDrop(Awkward):
    """Each sample skips some of the layers, some samples all."""

    def __init__(self) -> None:
        super().__init__(4)

    def hidden(self, sample: Sample) -> Tensor:
        x = sample.x
        for position, layer in enumerate(self.layers):
            if (sample.number * 7 + 3) >> position & 1:
                x = x + layer(x)
        return x


class EarlyExit(Awkward):
    """Each sample leaves after another layer."""

    def __init__(self) -> None:
        super().__init__(3)

    def hidden(self, sample: Sample) -> Tensor:
        x = sample.x
        for layer in self.layers[: 1 + sample.number % 3]:
            x = layer(x)
        return x


class Experts(Awkward):
    """Each layer has experts as modules; every sample uses one of them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(block() for _ in range(3))

        def forward(self, x: Tensor, number: int) -> Tensor:
            weights = self.router(x).softmax(-1)
            return x + self.experts[number % 3](x) * weights[:, number % 3, None]

    def __init__(self) -> None:
        super().__init__(0)
        self.layers.extend(self.Layer() for _ in range(2))

    def hidden(self, sample: Sample) -> Tensor:
        x = sample.x
        for position, layer in enumerate(self.layers):
            x = layer(x, sample.number + position)
        return x


class ExpertsAtTheTop(Experts):
    """One layer of experts, so that each expert is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]])

    def hidden(self, sample: Sample) -> Tensor:
        return super().hidden(sample)


class TiedHead(Awkward):
    """The weight of the first layer is that of the head's projection; only some samples run the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.projection.weight = self.layers[0][0].weight

    def hidden(self, sample: Sample) -> Tensor:
        x = self.layers[sample.number % 2](sample.x)
        return self.projection(x) if sample.number % 3 else x


class HeadOfUnit(TiedHead):
    """The same, with ranks that run the same layers: BERT's head is tied to an embedding inside of a unit."""

    def hidden(self, sample: Sample) -> Tensor:
        return self.projection(self.layers[1](self.layers[0](sample.x)))


class TiedUnits(Awkward):
    """Two layers share a weight, and each rank runs one of them."""

    def __init__(self) -> None:
        super().__init__(3)
        self.layers[2][0].weight = self.layers[0][0].weight

    def hidden(self, sample: Sample) -> Tensor:
        return self.layers[2 * (sample.number % 2)](self.layers[1](sample.x))


class Recurrent(Awkward):
    """A layer runs several times, another number of times for each sample."""

    def hidden(self, sample: Sample) -> Tensor:
        x = self.layers[0](sample.x)
        for _ in range(1 + sample.number % 3):
            x = self.layers[1](x)
        return x


class Interleaved(Awkward):
    """Two layers alternate, another number of times for each sample."""

    def hidden(self, sample: Sample) -> Tensor:
        x = sample.x
        for _ in range(1 + sample.number % 3):
            x = self.layers[1](self.layers[0](x))
        return x


class Lstm(Awkward):
    """LSTMs over sequences of different lengths; odd samples skip the second one."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers.extend(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def hidden(self, sample: Sample) -> Tensor:
        x = sample.x[:, None].expand(-1, 1 + sample.number % 3, -1)
        for layer in self.layers[: 1 + sample.number % 2]:
            x, _ = layer(x)
        return x[:, -1]


class SparseGradients(Awkward):
    """Embeddings with sparse gradients; each rank reads another table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, WIDTH, sparse=True) for _ in range(2))

    def hidden(self, sample: Sample) -> Tensor:
        rows = torch.tensor([sample.number % 5, (2 * sample.number) % 5])
        return self.layers[0](sample.x) + self.tables[sample.number % 2](rows)


class Checkpointed(Awkward):
    """Recomputed layers, of which each sample skips one; the first runs in two recomputed segments."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__(3)

    def hidden(self, sample: Sample) -> Tensor:
        x = sample.x.clone().requires_grad_(True)
        for position in (0, 1 + sample.number % 2, 0):
            x = x + checkpoint(self.layers[position], x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    """The same, with backwards inside of a backward."""

    reentrant = True


class DecoderFirst(Awkward):
    """Modules are registered in another order than they run, and some samples skip the encoder."""

    def __init__(self) -> None:
        super().__init__(4)

    def hidden(self, sample: Sample) -> Tensor:
        memory = sample.x if sample.number % 3 == 0 else self.layers[3](self.layers[2](sample.x))
        return self.layers[1](self.layers[0](sample.x) + memory)


class Unused(Awkward):
    """A layer that never runs, a frozen one, and one that runs for the first sample only."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[1].requires_grad_(False)

    def hidden(self, sample: Sample) -> Tensor:
        x = self.layers[1](self.layers[0](sample.x))
        return self.layers[3](x) if sample.number == 0 else x


class Detached(Awkward):
    """Both layers run, but only one of them gets gradients."""

    def hidden(self, sample: Sample) -> Tensor:
        first, second = (layer(sample.x) for layer in self.layers)
        return first.detach() + second if sample.number % 2 else first + second.detach()


class NoGradients(Awkward):
    """Odd samples run the layers without gradients."""

    def hidden(self, sample: Sample) -> Tensor:
        with torch.set_grad_enabled(sample.number % 2 == 0):
            return self.layers[1](self.layers[0](sample.x))


class WithoutCall(Awkward):
    """Weights of layers that are read without a call of the layer."""

    def hidden(self, sample: Sample) -> Tensor:
        linear: Any = self.layers[sample.number % 2][0]
        x = nn.functional.linear(sample.x, linear.weight, linear.bias).tanh()
        weights = {"0.weight": linear.weight * 0.5, "0.bias": linear.bias}
        return functional_call(self.layers[1], weights, (x,)) if sample.number % 3 else x


class WeightNorm(Awkward):
    """Weights that are computed in each forward; each rank runs one of the layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            weight_norm(layer[0])

    def hidden(self, sample: Sample) -> Tensor:
        return self.layers[sample.number % 2](sample.x)


class HeadAlone(Awkward):
    """The loss of odd samples does not depend on any layer."""

    def hidden(self, sample: Sample) -> Tensor:
        return sample.x if sample.number % 2 else self.layers[1](self.layers[0](sample.x))


class Trainer:
    """The engine of the reference: torch alone, on the samples of all ranks; ``count`` calls of ``step`` are a step."""

    def __init__(self, module: nn.Module, count: int) -> None:
        self.module, self.count, self.calls = module, count, 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.trained = [p for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.trained if p.dim() > 1]},
            {"params": [p for p in self.trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=1e-4)
        self.total = math.nan

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: Tensor) -> None:
        (loss / self.count).backward()
        self.total = (0.0 if math.isnan(self.total) else self.total) + loss.item() / self.count

    def step(self) -> None:
        self.calls += 1
        if self.calls < self.count:
            return
        for parameter in self.trained:  # a parameter without a gradient is updated with a gradient of zero
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            parameter.grad = gradient
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.trained, CLIP)))
        self.losses.append(self.total)
        self.optimizer.step()
        self.zero_grad()
        self.calls = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.total = math.nan  # the loss of a model is unknown if only the backward of another one reaches it


Step = Callable[[Sequence[Any], list[Sample]], None]


def plain(trainers: Sequence[Any], samples: list[Sample]) -> None:
    """The usual loop."""
    (model,) = trainers
    for sample in samples:
        model.backward(model(sample))
        model.step()


def backward_twice(trainers: Sequence[Any], samples: list[Sample]) -> None:
    """Some samples have a second backward, of an additional loss."""
    (model,) = trainers
    for sample in samples:
        model.backward(model(sample))
        if sample.number % 3 == 1:
            model.backward(model(Sample(sample.x * 0.5, sample.number + 1)))
        model.step()


def adversarial(trainers: Sequence[Any], samples: list[Sample]) -> None:
    """The generator's loss through the discriminator, whose gradients are then discarded, and the discriminator's."""
    generator, discriminator = trainers
    for sample in samples:
        generator.backward((discriminator(generator(sample.x)) - 1).square().mean())
        generator.step()
    discriminator.zero_grad()
    for sample in samples:
        fake = discriminator(generator(sample.x).detach()).square().mean()
        discriminator.backward(fake + (discriminator(sample.x + 1) - 1).square().mean())
        discriminator.step()


def joint(trainers: Sequence[Any], samples: list[Sample]) -> None:
    """One loss of two models; the backward of one reaches the other."""
    encoder, decoder = trainers
    for sample in samples:
        decoder.backward(decoder(encoder(sample.x)).square().mean())
        encoder.step()
        decoder.step()


def discriminator() -> nn.Module:
    return nn.Sequential(block(), block(1))


@dataclass(frozen=True)
class Case:
    """Models, the program that trains them, and whether ZeRO 3 can."""

    make: tuple[Callable[[], nn.Module], ...]
    step: Step = plain
    zero3: bool = True
    """Whether the ranks run the same units, so that ZeRO 3 computes the same; else it is an error."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``initialize``."""


CASES: dict[str, Case] = {
    "layer by rank": Case((LayerByRank,), zero3=False),
    "unequal layer by rank": Case((UnequalLayerByRank,), zero3=False),
    "branch by data": Case((BranchByData,), zero3=False),
    "LayerDrop": Case((LayerDrop,), zero3=False),
    "early exit": Case((EarlyExit,), zero3=False),
    "experts in layers": Case((Experts,)),
    "experts as units": Case((ExpertsAtTheTop,), zero3=False),
    "experts in a unit": Case((ExpertsAtTheTop,), options={"unit_classes": ["Layer"]}),
    "tied head": Case((TiedHead,), zero3=False),
    "head tied to a unit": Case((HeadOfUnit,)),
    "tied units": Case((TiedUnits,), zero3=False),
    "recurrent": Case((Recurrent,)),
    "interleaved": Case((Interleaved,), zero3=False),
    "LSTM": Case((Lstm,), zero3=False),
    "sparse gradients": Case((SparseGradients,), zero3=False),
    "checkpointed": Case((Checkpointed,), zero3=False),
    "checkpointed, reentrant": Case((CheckpointedReentrant,), zero3=False),
    "decoder before encoder": Case((DecoderFirst,), zero3=False),
    "unused and frozen layers": Case((Unused,), zero3=False),
    "no gradients on one rank": Case((NoGradients,), zero3=False),
    "detached": Case((Detached,), zero3=False),
    "weights without a call": Case((WithoutCall,), zero3=False),
    "weight norm": Case((WeightNorm,), zero3=False),
    "head alone": Case((HeadAlone,), zero3=False),
    "backward twice": Case((LayerByRank,), backward_twice, zero3=False),
    "the whole model as a unit": Case((LayerByRank,), options={"unit_classes": [LayerByRank]}),
    "GAN": Case((block, discriminator), adversarial),
    "joint loss of two engines": Case((block, discriminator), joint),
}

Result = dict[str, Any]


def _models(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make().double() for make in case.make]


def train_with_torch(name: str, ranks: int = 2) -> Result:
    """Losses, norms and weights of one process with torch alone."""
    case = CASES[name]
    trainers = [Trainer(model, MICRO_BATCHES * ranks) for model in _models(case)]
    for step in range(STEPS):
        case.step(trainers, samples_of(step, ranks))
    return {
        "losses": [each.losses for each in trainers],
        "norms": [each.norms for each in trainers],
        "weights": _weights([each.module.state_dict() for each in trainers]),
    }


def train_with_engines(name: str, ranks: int, rank: int, **settings: Any) -> Result:
    """The same through ``initialize``; one rank of a job."""
    case = CASES[name]
    config = {**COMMON, "global_batch_size": MICRO_BATCHES * ranks, **settings}
    engines = [megatron_core.initialize(model, config, **case.options).engine for model in _models(case)]
    losses: list[list[float]] = [[] for _ in engines]
    norms: list[list[float]] = [[] for _ in engines]
    for step in range(STEPS):
        case.step(engines, samples_of(step, ranks, rank))
        for number, engine in enumerate(engines):
            losses[number].append(engine.last_report.loss)
            norms[number].append(engine.last_report.grad_norm)
    states = [engine.full_state_dict() for engine in engines]
    return {"losses": losses, "norms": norms, "weights": _weights(states)}


def difference(a: Result, b: Result) -> float:
    """The largest difference of losses, norms and weights, relative to their size."""
    assert a["weights"].keys() == b["weights"].keys()
    pairs = [(np.array(a[kind]), np.array(b[kind])) for kind in ("losses", "norms")]
    pairs += [(a["weights"][name], b["weights"][name]) for name in a["weights"]]
    if any((np.isnan(x) != np.isnan(y)).any() for x, y in pairs):
        return math.inf
    return max(float(np.nanmax(np.abs(x - y), initial=0.0) / max(np.nanmax(np.abs(y)), 1e-3)) for x, y in pairs)


def _weights(states: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    return {f"{at}.{name}": x.numpy().copy() for at, state in enumerate(states) for name, x in state.items()}
