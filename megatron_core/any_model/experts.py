"""Expert parallelism of any model: each rank keeps a part of the experts, and tokens are sent to them.

A module of experts stacks its matrices, ``[experts, ...]``, and its ``forward(hidden_states, top_k_index,
top_k_weights)`` returns the weighted sum of the outputs of each token's experts, as in transformers. The module's own
forward computes this rank's experts on the tokens that arrive, so its activation, clamping and biases stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.experts.dispatch import AllToAll, Dispatched
from megatron_core.features.experts.router import Routing
from megatron_core.parallel.compiled import DerivedForward
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import ShardSpec, spec_of, split, split_over
from megatron_core.parallel.texts import listed, raising_on_all_ranks

SETTING = "expert_model_parallel_size"
CHOICES = 2
"""Experts of each token in the check of a module."""
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Relative error up to which outputs are equal. Modules of transformers compute parts of float64 in float32."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def split_experts(model: nn.Module, groups: ParallelGroups, device: torch.device) -> None:
    """Keep this rank's experts of each module of experts in ``model``, which is equal on all ranks.

    Errors: ``ConfigError`` on all ranks without such modules, or for experts of another form; ``LayoutError`` if the
    number of experts cannot be divided.
    """
    with raising_on_all_ranks(device):
        modules = find_experts(model, groups.size("ep"))
        # Layers repeat one structure, so one of each is checked.
        structures = {(type(m), tuple(p.shape for p in m.parameters())): name for name, m in modules.items()}
        for name in structures.values():
            _check_separable(name, modules[name])
    with raising_on_all_ranks(device):
        for name, module in modules.items():
            _keep_part(name, module, groups)
    attributes: Any = model
    attributes.expert_parallel_size = groups.size("ep")


def find_experts(model: nn.Module, size: int) -> dict[str, nn.Module]:
    """Return the modules of experts by name, each of which can be divided over ``size`` ranks.

    Errors: see ``split_experts``. What looks like experts and cannot be split is an error, so that none stay whole on
    every rank unnoticed.
    """
    owners: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not _looks_like_experts(name, module):
            continue
        reason = _refusal(module, owners)
        if reason:
            raise ConfigError(
                f"{SETTING}={size}: {name} ({type(module).__name__}) cannot be split, because {reason}; set "
                f"{SETTING}=1, or write its experts as stacked parameters [experts, ...] with forward(hidden_states, "
                "top_k_index, top_k_weights)"
            )
        count = _count_of(module)
        if count % size:
            raise LayoutError(
                f"{name} ({type(module).__name__}): its {count} experts cannot be split over {SETTING}={size}; choose "
                f"a divisor of {count}"
            )
        modules[name] = module
    inside = tuple(f"{name}." for name in modules)
    whole = [
        name
        for name, _ in model.named_parameters()
        if any("expert" in part for part in name.split(".")[:-1])
        and "shared" not in name
        and not name.startswith(inside)
    ]
    if whole:
        raise ConfigError(
            f"{SETTING}={size}: {listed(whole)} would stay whole on every rank, because the module of experts has "
            f"another form than stacked parameters [experts, ...]; set {SETTING}=1"
        )
    if not modules:
        raise ConfigError(
            f"{SETTING}={size}: {type(model).__name__} has no module of experts (parameters [experts, ...], and "
            f"forward(hidden_states, top_k_index, top_k_weights)); set {SETTING}=1"
        )
    return modules


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    label = name.rpartition(".")[2].lower()
    # Shared experts run on every token of every rank, like the rest of the model.
    if "shared" in label or "shared" in type(module).__name__.lower():
        return False
    is_named = "expert" in label or "expert" in type(module).__name__.lower()
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return is_named and len(module) > 1 and next(module.parameters(), None) is not None
    stacks = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return bool(stacks) and (is_named or (bool(_counts(module)) and any(p.dim() > 2 for p in stacks)))


def _refusal(module: nn.Module, owners: dict[nn.Parameter, int]) -> str:
    """Return why a module of experts cannot be split, or an empty text."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return "its experts are separate modules, which the model calls itself"
    parameters = dict(module.named_parameters(recurse=False))
    count = _count_of(module)
    unstacked = [name for name, parameter in parameters.items() if parameter.shape[:1] != (count,)]
    if not count:
        return "none of its attributes with 'experts' in their names is the first extent of its parameters"
    if unstacked:
        return f"{listed(unstacked)} has no entry for each of its {count} experts"
    if any(owners[parameter] > 1 for parameter in parameters.values()):
        return "it shares a parameter with another module"
    if next(module.buffers(), None) is not None:
        return "it has buffers, which may have an entry for each expert"
    meta = next((name for name, parameter in parameters.items() if parameter.is_meta), None)
    if meta is not None:
        return f"{meta} is on the meta device (construct the model with memory)"
    arguments = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(arguments) < 3 or any(p.default is p.empty for p in arguments[3:]):
        return f"its forward takes ({', '.join(p.name for p in arguments)})"
    return ""


def _counts(module: nn.Module) -> dict[str, int]:
    """Return the attributes of ``module`` that hold its number of experts."""
    extents = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() > 1}
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and "expert" in name.lower() and extents == {value}
    }


def _count_of(module: nn.Module) -> int:
    return next(iter(_counts(module).values()), 0)


@torch.no_grad()
def _check_separable(name: str, module: nn.Module) -> None:
    """ConfigError unless each part of the experts, run alone, computes what it does among all of them.

    The module's forward may do anything with its experts, such as divide by the sum of their weights. So the whole
    module runs on random tokens, and then each of its experts alone, on the rows that the dispatcher would send.
    """
    weight = next(module.parameters(recurse=False))
    count = _count_of(module)
    hidden = _width(module)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2 * count, hidden, generator=generator).to(weight)
    experts = torch.rand(2 * count, count, generator=generator).argsort(1)[:, :CHOICES].to(weight.device)
    weights = torch.rand(experts.shape, generator=generator).to(weight)
    expected = _run(name, module, tokens, experts, weights)
    total = torch.zeros_like(expected)
    parameters = dict(module.named_parameters(recurse=False))
    for expert in range(count):
        token, choice = torch.where(experts == expert)
        alone = {label: nn.Parameter(p[expert : expert + 1], p.requires_grad) for label, p in parameters.items()}
        with _replaced(module, alone, 1):
            rows = _run(name, module, tokens[token], torch.zeros_like(token)[:, None], weights[token, choice, None])
        total.index_add_(0, token, rows)
    error = float((total - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not error <= BOUNDS.get(weight.dtype, 0.05):
        raise ConfigError(
            f"{SETTING}: {name} ({type(module).__name__}) cannot be split, because its output is not the sum of the "
            f"outputs of its experts, each run alone (relative error {error:.2g}); set {SETTING}=1"
        )


def _run(name: str, module: nn.Module, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    was_training = module.training
    module.eval()  # without dropout
    try:
        output = module.forward(tokens, experts, weights)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{SETTING}: {name} ({type(module).__name__}) cannot be split, because its forward(hidden_states, "
            f"top_k_index, top_k_weights) fails alone ({error}); set {SETTING}=1"
        ) from error
    finally:
        module.train(was_training)
    if not isinstance(output, Tensor) or output.shape != tokens.shape:
        raise ConfigError(
            f"{SETTING}: {name} ({type(module).__name__}) cannot be split, because its output is not a tensor with "
            f"the shape of hidden_states; set {SETTING}=1"
        )
    return output


def _width(module: nn.Module) -> int:
    """Return the extent that all matrices of an expert have in common, of which the first is the tokens' width."""
    names = ("hidden_dim", "hidden_size", "input_size")
    stated = [value for name in names if type(value := getattr(module, name, None)) is int]
    if stated:
        return stated[0]
    matrices = [set(p.shape[1:]) for p in module.parameters(recurse=False) if p.dim() > 2]
    return min(set.intersection(*matrices), default=matrices[0].pop())


@contextmanager
def _replaced(module: nn.Module, parameters: dict[str, nn.Parameter], count: int) -> Iterator[None]:
    """Return a context in which ``module`` has other parameters, of ``count`` experts."""
    before = dict(module._parameters)
    numbers = _counts(module)
    module._parameters.update(parameters)
    vars(module).update(dict.fromkeys(numbers, count))
    try:
        yield
    finally:
        module._parameters.update(before)
        vars(module).update(numbers)


def _keep_part(name: str, module: nn.Module, groups: ParallelGroups) -> None:
    """Drop the experts of other ranks, and let ``module`` send its tokens to them."""
    count = _count_of(module)
    local = count // groups.size("ep")
    first = groups.index("ep") * local
    numbers = _counts(module)
    for parameter in module.parameters(recurse=False):
        spec = _spec_of_part(parameter, groups)
        # A copy: a view would keep the memory of all experts.
        parameter.data = parameter.data[first : first + local].clone()
        attributes: Any = parameter
        attributes.shard_spec = spec
    vars(module).update(dict.fromkeys(numbers, local))
    # The ranks of a tensor-parallel group have the same tokens, so each sends its tokens to ranks with its own part
    # of the matrices.
    dispatcher = AllToAll(groups, count, axes="ep")
    forward: Callable[..., Any] = module.forward
    module.forward = DerivedForward(forward, partial(_dispatched_forward, name=name, dispatcher=dispatcher))


def _spec_of_part(parameter: nn.Parameter, groups: ParallelGroups) -> ShardSpec:
    """Return the spec of this rank's experts of a parameter that may be split over tensor-parallel ranks."""
    tensor = spec_of(parameter)
    of_experts = replace(
        tensor,
        splits=tuple(replace(tensor_split, axis="etp") for tensor_split in tensor.splits),
        indices=(("etp", groups.index("etp")),),
        partial_axes=tuple("etp" for _ in tensor.partial_axes),
    )
    of_ranks = split(tensor.global_shape, 0, groups.index("ep"), groups.size("ep"), axis="ep")
    return split_over(of_ranks, of_experts, replica_axes=("edp",))


def _dispatched_forward(forward: Callable[..., Any], name: str, dispatcher: AllToAll) -> Forward:
    """Return a forward that runs ``forward`` on the tokens of all ranks for this rank's experts."""

    # Its sizes are those of the messages, which differ in each step.
    @torch._dynamo.disable
    def dispatched(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        fits = top_k_index.shape == top_k_weights.shape and top_k_weights.is_floating_point()
        if not fits or top_k_index.is_floating_point():
            raise ConfigError(
                f"{SETTING}: {name} is called with top_k_index {_shown(top_k_index)} and top_k_weights "
                f"{_shown(top_k_weights)}; both need one entry for each choice of a token, integers and numbers; set "
                f"{SETTING}=1"
            )
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        choices = top_k_index.shape[-1]
        routing = Routing(top_k_index.reshape(-1, choices), top_k_weights.reshape(-1, choices))
        sent = dispatcher.dispatch(tokens, routing)
        return sent.combine(_run_local(forward, sent)).view_as(hidden_states)

    return dispatched


def _run_local(forward: Callable[..., Any], sent: Dispatched) -> Tensor:
    rows = sent.rows
    if len(rows) == 0:
        # Part of the graph all the same: backward of this rank, too, must take part in the exchange of gradients.
        module: nn.Module = forward.__self__  # type: ignore[attr-defined]
        nothing = sum(p.reshape(-1)[:0].sum() for p in module.parameters(recurse=False) if p.requires_grad)
        return rows * sent.probs[:, None].to(rows.dtype) + nothing
    counts = torch.tensor(sent.counts, device=rows.device)
    local = torch.arange(len(sent.counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
    return forward(rows, local[:, None], sent.probs[:, None])


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
