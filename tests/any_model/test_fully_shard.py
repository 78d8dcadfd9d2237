"""``megatron_core.fully_shard`` trains as FSDP2 does: losses, norms, gradients and weights of several steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import megatron_core
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

WORDS, WIDTH, STEPS = 17, 10, 2
Result = dict[str, Any]


class Block(nn.Module):
    """A layer with widths that the ranks do not divide, and with a parameter that no forward reads."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Add the layer's change to ``x``."""
        compute = lambda x: self.down(torch.tanh(self.up(self.norm(x))))  # noqa: E731
        return x + (checkpoint(compute, x, use_reentrant=False) if self.recompute else compute(x))


class Model(nn.Module):
    """A language model with tied weights."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale

    def features(self, tokens: Tensor) -> Tensor:
        """Return the embeddings, scaled."""
        return self.words(tokens) * self.scale


class NormedSGD(torch.optim.SGD):
    """An optimizer whose steps depend on whole matrices: it runs on the DTensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step of length ``lr``."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm() * group["lr"])


def _made(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def _shard(shard: Callable[..., Any], model: Model, **options: Any) -> Model:
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model


def _train(
    model: Any,
    *,
    micro_batches: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    before: Callable[[int], None] = lambda number: None,
) -> Result:
    """Return losses, norms and gradients of some steps, and the weights after them."""
    update = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    result: Result = {}
    for step in range(STEPS):
        for number in range(micro_batches):
            before(number)
            tokens = torch.randint(WORDS, (dist.get_world_size(), 2, 6), generator=generator)[dist.get_rank()]
            loss = functional.cross_entropy(model(tokens).double().flatten(0, 1), tokens.roll(1, 1).flatten())
            (loss / micro_batches).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        result |= {f"loss {step}": loss.item(), f"norm {step}": norm.full_tensor().item()}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        result |= {f"gradient {step} {name}": _rows(gradient) for name, gradient in gradients.items()}
        update.step()
        update.zero_grad()
    return result | {name: _rows(tensor) for name, tensor in model.state_dict().items()}


def _rows(tensor: Any) -> np.ndarray:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().clone().numpy()


def _accumulated(shard: Any, **after_backward: bool) -> Result:
    model: Any = _shard(shard, _made())
    update = {"set_reshard_after_backward": after_backward} if after_backward else {}

    def before(number: int) -> None:
        model.set_requires_gradient_sync(number == 1)
        model.set_is_last_backward(number == 1)
        if update:
            model.set_reshard_after_backward(number == 1)

    return _train(model, micro_batches=2, before=before)


def _frozen(shard: Any) -> Result:
    model = _made()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    _shard(shard, model)

    def thaw(number: int) -> None:
        model.blocks[0].up.bias.requires_grad_(True)

    return _train(model, before=thaw)


def _nested(shard: Any) -> Result:
    """Units inside of units and units of two modules, kept and freed after their forward, and an ignored parameter."""
    model = _made()
    shard(model.blocks[0].up)
    shard(model.blocks[0], reshard_after_forward=False)
    shard([model.blocks[1], model.blocks[2]])
    shard(model, ignored_params={model.blocks[2].unused.weight})
    del model.blocks[2].unused
    return _train(model)


def _mixed(shard: Any, reduce: torch.dtype) -> Result:
    model: Any = _made().float()
    for block in model.blocks:
        shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce))
    shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce, torch.float32))
    return _train(model, micro_batches=2, before=lambda number: model.set_requires_gradient_sync(number == 1))


def _hybrid(shard: Any) -> Result:
    if dist.get_world_size() < 4:
        return {}
    return _train(_shard(shard, _made(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))))


def _from_meta(shard: Any) -> Result:
    """Weights that are filled after the call, and an optimizer that was made before."""
    with torch.device("meta"):
        model = Model()
    _shard(shard, model.double())
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        rows: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        with torch.no_grad():
            rows.copy_(torch.linspace(-0.3, 0.4, rows.numel() or 1)[: rows.numel()].view(rows.shape) + len(name) / 99)
    return _train(model)


def _own_weights(shard: Any) -> Result:
    """Evaluations, weights that a program gathers, and methods other than ``forward``."""
    model: Any = _shard(shard, _made())
    register_fsdp_forward_method(model, "features")
    tokens = torch.arange(6).view(1, 6)
    result = _train(model)
    with torch.no_grad():
        result["evaluation"] = model(tokens).numpy()
    result["features"] = model.features(tokens).detach().numpy()
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    result["whole"] = model.blocks[0].up.weight.detach().clone().numpy()
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.set_reshard_after_forward(True)
    model.set_gradient_divide_factor(1.0)
    return result | {f"again {name}": value for name, value in _train(model).items()}


def _recomputed_outside(shard: Any) -> Result:
    model = _made()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = shard(checkpoint_wrapper(block))
    return _train(shard(model))


def _with_closure(shard: Any) -> Result:
    """The optimizer computes the gradients itself, as in programs of Lightning."""
    model: Any = _shard(shard, _made())
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(6).view(1, 6) + dist.get_rank()

    def compute() -> Tensor:
        update.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        return loss

    result = {f"loss {step}": update.step(compute).item() for step in range(3)}
    return result | {name: _rows(tensor) for name, tensor in model.state_dict().items()}


CASES: dict[str, Callable[[Any], Result]] = {
    "plain": lambda shard: _train(_shard(shard, _made())),
    "SGD, one unit": lambda shard: _train(shard(_made()), optimizer=partial(torch.optim.SGD, momentum=0.9)),
    "zero 2": lambda shard: _train(_shard(shard, _made(), reshard_after_forward=False)),
    "recomputed": lambda shard: _train(_shard(shard, _made(recompute=True))),
    "recomputed outside": _recomputed_outside,
    "accumulated": _accumulated,
    "accumulated, kept": partial(_accumulated, kept=True),
    "frozen": _frozen,
    "nested": _nested,
    "bf16, sums in float32": partial(_mixed, reduce=torch.float32),
    "bf16": partial(_mixed, reduce=torch.bfloat16),
    "hybrid": _hybrid,
    "meta": _from_meta,
    "own weights": _own_weights,
    "foreach": lambda shard: _train(_shard(shard, _made()), optimizer=partial(torch.optim.Adam, foreach=True)),
    "closure": _with_closure,
    "whole matrices": lambda shard: _train(_shard(shard, _made()), optimizer=NormedSGD),
}


OF_SIZE = ("plain", "accumulated", "frozen", "nested", "bf16", "hybrid")
"""Cases whose messages or rounding depend on the number of ranks."""


def _both(cases: list[str]) -> dict[str, tuple[Result, Result]]:
    return {name: (CASES[name](megatron_core.fully_shard), CASES[name](fsdp.fully_shard)) for name in cases}


@pytest.mark.every_case
@pytest.mark.parametrize(("ranks", "cases"), [(2, list(CASES)), (4, list(OF_SIZE))])
def test_steps_are_those_of_fsdp2(ranks: int, cases: list[str]) -> None:
    for results in run_ranks(ranks, _both, cases, backend="gloo"):
        for case, (ours, theirs) in results.items():
            assert ours.keys() == theirs.keys(), case
            for name, value in theirs.items():
                bound = 1e-6 if "bf16" in case else 1e-12
                if case == "bf16":  # sums of another order, rounded to bfloat16; Adam amplifies differences near zero
                    bound = 2**-7 if "0" in name.split()[-2:] else 1.0
                scale = max(np.abs(value).max(initial=0), 1e-3)
                assert np.abs(ours[name] - value).max(initial=0) <= bound * scale, (case, name)


def _trained() -> Model:
    """The model without parameters that have no gradient: torch refuses to load an optimizer without their state."""
    model = _made()
    for block in model.blocks:
        del block.unused
    return model


def _save(folder: str) -> Result:
    """Two steps, and a checkpoint in between; return the second step."""
    model: Any = _shard(megatron_core.fully_shard, _trained())
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(model, update)
    weights, optimizer = get_state_dict(model, update)
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=folder)
    _step(model, update)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.numpy() for name, tensor in whole.items()}


def _load(folder: str, shard: Callable[..., Any] | None) -> Result:
    """The second step from the checkpoint, in a program of our or torch's ``fully_shard``."""
    model: Any = _shard(shard or fsdp.fully_shard, _trained())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, optimizer = get_state_dict(model, update)
    dcp.load({"model": weights, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(model, update, model_state_dict=weights, optim_state_dict=optimizer)
    _step(model, update)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.numpy() for name, tensor in whole.items()}


def _step(model: Any, update: torch.optim.Optimizer) -> None:
    tokens = torch.arange(24).view(4, 6) % WORDS
    rows = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    functional.cross_entropy(model(rows).flatten(0, 1), rows.roll(1, 1).flatten()).backward()
    update.step()
    update.zero_grad()


def _evaluated(evaluates: bool) -> Result:
    model = _shard(megatron_core.fully_shard, _made())
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if evaluates:

        @torch.no_grad()
        def evaluate(*_: Any) -> None:
            model(torch.zeros(1, 6, dtype=torch.int64))

        update.register_step_pre_hook(evaluate)
    for _ in range(STEPS):
        _step(model, update)
    return {name: _rows(tensor) for name, tensor in model.state_dict().items()}


def test_an_evaluation_between_backward_and_step_changes_nothing() -> None:
    # With torch's fully_shard the next step computes with the weights from before the update.
    with_evaluations, without = (run_ranks(2, _evaluated, evaluates)[0] for evaluates in (True, False))
    for name, weights in without.items():
        np.testing.assert_array_equal(with_evaluations[name], weights)


@pytest.mark.every_case
def test_checkpoints_of_torch_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _save, folder, backend="gloo")[0]
    for ranks, shard in ((4, megatron_core.fully_shard), (1, megatron_core.fully_shard), (2, None)):
        loaded = run_ranks(ranks, _load, folder, shard, backend="gloo")[0]
        assert loaded.keys() == saved.keys()
        assert max(np.abs(loaded[name] - saved[name]).max() for name in saved) < 1e-12


def _refusals(_: None) -> dict[str, str]:
    shard = megatron_core.fully_shard
    compiled = nn.Linear(2, 2)
    compiled.compile()
    sharded: Any = _shard(shard, _made())
    on_meta: Any = shard(nn.Linear(2, 2, device="meta"))
    tokens = torch.zeros(1, 2, dtype=torch.long)
    attempts: dict[str, Callable[[], Any]] = {
        "reshard_after_forward=2": lambda: shard(_made(), reshard_after_forward=2),
        "Shard(dim=1)": lambda: shard(_made(), shard_placement_fn=lambda parameter: Shard(1)),
        "Linear is compiled": lambda: shard(compiled),
        "FSDPLinear is compiled": lambda: torch.compile(shard(nn.Linear(2, 2)), backend="eager")(torch.zeros(1, 2)),
        "FSDPModel is compiled": lambda: (sharded(tokens), torch.compile(sharded, backend="eager")(tokens)),
        "ModuleList has no forward": lambda: shard(_made().blocks),
        "sharded already": lambda: shard(sharded),
        "a DTensor already": lambda: shard(_split_by_torch()),
        "has no dims": lambda: shard(_scalar()),
        "set_custom_all_gather": lambda: sharded.set_custom_all_gather(None),
        "meta device": lambda: on_meta(torch.zeros(1, 2)),
        "deepcopy": lambda: copy.deepcopy(sharded),
        "create_graph": lambda: sharded(tokens).sum().backward(create_graph=True),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ConfigError as error:
            messages[name] = str(error)
        else:
            messages[name] = "no error"
    sharded.reset_iter_state()
    sharded(tokens).sum().backward()
    return messages


def _split_by_torch() -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    return parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": ColwiseParallel()})


def _scalar() -> nn.Module:
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.ones(()))
    return module


def test_what_is_not_possible_is_refused_by_name() -> None:
    for name, message in run_ranks(1, _refusals, None, backend="gloo")[0].items():
        assert name in message, (name, message)
