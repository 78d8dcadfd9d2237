"""A model as a list of layers, for ``PipelineModule``, and its training in one process with torch alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import megatron_core
from megatron_core import LayerSpec, PipelineModule, TiedLayerSpec
from tests.any_model.models import CLIP, COMMON, DECAY, LR, Result

WORDS, WIDTH = 13, 8


class Table(nn.Module):
    """An embedding whose weight is also the output layer; it passes the tokens on, as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.5)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        """Tokens ``[b, s]`` -> hidden ``[b, s, h]``, the tokens, and nothing."""
        return {"hidden": self.weight[tokens], "tokens": tokens, "none": None}


class Block(nn.Module):
    """A layer that reads the tokens, and whose hidden states are two tensors."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        """Add to the hidden states, at even tokens twice."""
        self.calls += 1
        factor = 2 - x["tokens"].unsqueeze(-1) % 2
        skip = x["hidden"] if x.get("skip") is None else x["skip"]
        return x | {"hidden": x["hidden"] + factor * self.down(self.up(x["hidden"]).tanh()), "skip": skip * 0.5}


def logits_of(table: Table, x: Any) -> Tensor:
    """The logits of the hidden states."""
    return nn.functional.linear(x, table.weight)


def table_again(table: Table, x: dict[str, Any]) -> dict[str, Any]:
    """A use of the table between two layers."""
    return x | {"hidden": x["hidden"] + table.weight[x["tokens"]]}


def join(x: dict[str, Any]) -> Tensor:
    """Leave only the hidden states."""
    return x["hidden"] + x["skip"]


def loss_of_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def specs() -> list[Any]:
    """Eight layers, three of which share a table."""
    table = partial(TiedLayerSpec, "table", Table)
    blocks = [LayerSpec(Block, inner) for inner in (12, 20, 8)]
    before = [table(), blocks[0], blocks[1], table(forward_fn=table_again)]
    return [*before, blocks[2], join, nn.LayerNorm(WIDTH), table(forward_fn=logits_of)]


def module(**options: Any) -> PipelineModule:
    """A ``PipelineModule`` of ``specs``."""
    return PipelineModule(specs(), loss_fn=loss_of_logits, **options)


def samples(count: int = 30) -> list[tuple[Tensor, Tensor]]:
    """Sequences of tokens, of two lengths, as inputs and labels."""
    found = []
    for number in range(count):
        tokens = torch.randint(WORDS, (6,), generator=torch.Generator().manual_seed(number))
        found.append((tokens, tokens))
    return found


def train_whole(batch_size: int, steps: int) -> Result:
    """Train the layers in one process with torch alone."""
    model = module()
    model.place([range(len(model.specs))], [0])
    model.double()
    trained = list(model.parameters())
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=1e-4)
    data, losses, norms, gradients = samples(), [], [], {}
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for tokens, labels in data[step * batch_size : (step + 1) * batch_size]:
            loss = loss_of_logits(model(tokens.unsqueeze(0)), labels.unsqueeze(0)) / batch_size
            loss.backward()
            total += loss.detach()
        gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def train_placed(steps: int, settings: dict[str, Any], options: dict[str, Any]) -> Result:
    """Train the layers with the engine, one rank of a job; middle stages get no batches."""
    config = {**COMMON, **settings}
    engine, _, loader, _ = megatron_core.initialize(module(**options), config, training_data=samples(), shuffle=False)
    losses, norms, gradients = [], [], {}

    def read_gradients() -> None:
        for parameter, place in engine.staged.places.items():
            gradients[place.name] = engine.whole.gradient(parameter).numpy().copy()

    engine.before_update = read_gradients
    where = engine.plans.stage_to_rank
    reads = engine.groups.index("pp") in (where[0], where[-1])
    batches = iter(loader) if reads else None
    for _ in range(steps):
        report = engine.train_batch(batches)
        losses.append(report.loss)
        norms.append(report.grad_norm)
    names = {name for name, _ in _whole_parameters()}
    weights = {name: tensor.numpy() for name, tensor in engine.full_state_dict().items() if name in names}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def _whole_parameters() -> list[tuple[str, nn.Parameter]]:
    whole = module()
    whole.place([range(len(whole.specs))], [0])
    return list(whole.named_parameters())
