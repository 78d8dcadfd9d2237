"""Layers ``MoE`` of DeepSpeed and of the drop-in: outputs, gradients and training on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.drop_in.deepspeed.compare import describe_ranks

HIDDEN = 8


@dataclass(frozen=True)
class Layer:
    """Arguments of a layer, and its inputs."""

    arguments: dict[str, Any]
    dtype: str = "float64"
    training: bool = True
    used_tokens: bool = False
    returns_bias: bool = False
    """Whether the experts return a tuple."""


class Expert(nn.Module):
    """Two matrices; ``with_bias`` returns a tuple, as Megatron's layers do."""

    def __init__(self, with_bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)
        self.with_bias = with_bias

    def forward(self, hidden: Tensor) -> Any:
        """The output, or (output, bias)."""
        output = self.down(torch.tanh(self.up(hidden)))
        return (output, self.down.bias) if self.with_bias else output


def run_layer(values: dict[str, Any]) -> list[Any]:
    """Output, loss, counts and all gradients of a layer with random weights."""
    from deepspeed.moe.layer import MoE

    case = Layer(**values)
    torch.manual_seed(0)
    layer = MoE(HIDDEN, Expert(case.returns_bias), **case.arguments)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer = layer.to(getattr(torch, case.dtype)).train(case.training)
    hidden = torch.randn(3, 7, HIDDEN, dtype=torch.float64).to(getattr(torch, case.dtype)).requires_grad_()
    used = (torch.arange(21) % 4 > 0).long() if case.used_tokens else None
    torch.manual_seed(1)
    output, loss, counts = layer(hidden, used)
    (output.double().square().sum() + 3 * loss).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert hidden.grad is not None
    return [
        output.double().tolist(),
        loss.item(),
        counts.tolist(),
        hidden.grad.double().tolist(),
        {name: [] if grad is None else grad.double().tolist() for name, grad in gradients.items()},
    ]


@dataclass(frozen=True)
class Job:
    """A training of two layers on ranks."""

    name: str
    arguments: dict[str, Any]
    zero: int = 0
    ranks: int = 2
    splits_groups: bool = False
    """Whether the program makes groups for experts."""
    config: dict[str, Any] = field(default_factory=dict)


class Model(nn.Module):
    """Dense layers around two mixtures of experts, and a loss with that of the gates."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ModuleList(MoE(HIDDEN, Expert(False), **arguments) for _ in range(2))
        self.last = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss."""
        hidden, balance = self.first(x), 0.0
        for layer in self.experts:
            output, loss, _ = layer(hidden)
            hidden, balance = hidden + output, balance + loss
        return (self.last(hidden).squeeze(-1) - y).square().mean() + 0.1 * balance


def train(values: dict[str, Any]) -> dict[str, Any]:
    """Losses of each step on all ranks, and sums of squares of the weights of all ranks."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    job = Job(**values)
    describe_ranks()
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model(job.arguments)
    first = rank % job.arguments["ep_size"] * len(model.experts[0].deepspeed_moe.experts.deepspeed_experts)
    for number, layer in enumerate(model.experts):
        for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            torch.manual_seed(100 * number + first + local)
            for parameter in expert.parameters():
                nn.init.normal_(parameter, std=0.3)
    if rank:  # of no consequence: dense weights are those of rank 0
        nn.init.zeros_(model.first.weight)
    given: dict[str, Any] = {}
    if job.splits_groups:
        group = {"params": list(model.parameters()), "name": "all"}
        groups = split_params_into_different_moe_groups_for_optimizer(group)
        given["optimizer"] = torch.optim.AdamW(groups, lr=0.01)
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job.zero},
        **({} if job.splits_groups else {"optimizer": optimizer}),
        **job.config,
    }
    engine = deepspeed.initialize(model=model, config=config, **given)[0]
    assert engine.has_moe_layers
    losses: list[float] = []
    torch.manual_seed(7 + rank)
    data = torch.Generator().manual_seed(rank)
    for _ in range(12):
        x = torch.randn(2, 6, HIDDEN, generator=data)
        loss = engine(x, x.sum(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        squares = {name: p.detach().double().square().sum().item() for name, p in engine.module.named_parameters()}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (losses, squares))
    return {"losses": [entry[0] for entry in by_rank], "weights": [entry[1] for entry in by_rank]}


def groups_of_parameters(max_group_size: float | None) -> list[list[Any]]:
    """Name, mark and numbers of the parameters of each group that DeepSpeed's functions make."""
    from deepspeed.moe import utils

    model = nn.ModuleList([Model({"num_experts": 4, "ep_size": ep}) for ep in (1, 2)])
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    listed = list(model.parameters())
    given = [{"params": listed[::2], "name": "even", "lr": 0.1}, {"params": listed[1::2], "name": "odd"}]
    made = utils.split_params_into_different_moe_groups_for_optimizer(tuple(given), max_group_size)
    made += utils.configure_moe_param_groups(listed)
    made.append({"params": utils.split_params_into_shared_and_expert_params(listed)[1]})
    return [[g.get("name"), g.get("moe"), g.get("lr"), sorted(numbers[p] for p in g["params"])] for g in made]


def freeze_biases(model: nn.Module) -> None:
    """Freeze one bias of each expert of this rank."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("up.bias"))


def save_and_load(folder: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of two steps before and after a checkpoint is loaded, and names of all weights of the model.

    ``folder`` gets a file of the weights that are not frozen.
    """
    import deepspeed

    describe_ranks()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": 1},
    }
    model = Model({"num_experts": 4, "ep_size": 2, "min_capacity": 0, "use_rts": False})
    freeze_biases(model)
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    runs = []
    for _ in range(2):
        engine.load_checkpoint(folder)
        data = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for _ in range(3):
            x = torch.randn(2, 6, HIDDEN, generator=data)
            loss = engine(x, x.sum(-1))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        runs.append(losses)
    return runs[0], runs[1], list(engine.core.full_state_dict())
