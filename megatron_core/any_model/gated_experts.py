"""``MoE``: a layer of experts with a capacity, whose parameters have the names of ``deepspeed.moe.layer.MoE``.

Each rank constructs ``num_experts / ep_size`` experts; ``connect_experts`` gives the layers of a model their group of
ranks. Every rank fills a buffer ``[E, C, hidden]`` from its own tokens (``gating``), and the ranks exchange its parts.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megatron_core.any_model.gating import (
    Routes,
    buffer_slots,
    combine_rows,
    fill_buffers,
    jittered,
    top1gating,
    top2gating,
    topkgating,
)
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.collectives import broadcast_, exchange_parts
from megatron_core.parallel.groups import Group, ParallelGroups, process_group
from megatron_core.parallel.sharding import split, split_over

POLICIES = (None, "None", "Jitter", "RSample")
LIST = "deepspeed_experts"


class TopKGate(nn.Module):
    """Chooses ``k`` of ``num_experts`` experts for each token, in float32; see ``MoE``."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Group | None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.min_capacity = min_capacity
        self.drop_tokens = drop_tokens
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.noisy_gate_policy = noisy_gate_policy
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, tokens: Tensor, used_token: Tensor | None = None, sparse_routes: bool = False) -> Any:
        """Route ``tokens`` ``[S, model_dim]``; the results are those of ``top1gating``."""
        wide = tokens.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            wide = jittered(wide)
        logits = functional.linear(wide, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        options: dict[str, Any] = {
            "min_capacity": self.min_capacity,
            "drop_tokens": self.drop_tokens,
            "ep_group": self.ep_group,
            "sparse_routes": sparse_routes,
        }
        if self.k == 1:
            policy = self.noisy_gate_policy if self.training else None
            return top1gating(
                logits, factor, used_token=used_token, noisy_gate_policy=policy, use_rts=self.use_rts, **options
            )
        if used_token is not None:
            raise ConfigError(f"MoE: used_token with k={self.k} has no effect in DeepSpeed; leave it out, or set k=1")
        if self.k == 2:
            return top2gating(logits, factor, top2_2nd_expert_sampling=self.top2_2nd_expert_sampling, **options)
        return topkgating(logits, self.k, factor, **options)


class LocalExperts(nn.Module):
    """This rank's experts, each a copy of ``expert``."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(num_local_experts)])
        for parameter in self.parameters():
            vars(parameter).update(allreduce=False, group_name=expert_group_name)

    def forward(self, buffers: Tensor) -> Tensor:
        """``[ranks, experts, rows, hidden]``, of the same shape afterwards."""
        chunks = buffers.chunk(len(self.deepspeed_experts), dim=1)
        outputs = [expert(chunk) for expert, chunk in zip(self.deepspeed_experts, chunks, strict=True)]
        return torch.cat([entry[0] if isinstance(entry, tuple) else entry for entry in outputs], dim=1)


class GatedExperts(nn.Module):
    """Sends tokens to the experts of all ranks, and combines the results."""

    def __init__(self, gate: TopKGate, experts: LocalExperts, ep_size: int) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_size = ep_size
        self.ep_group: Group | None = None
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    def connect(self, group: Group) -> None:
        """Use ``group`` for the exchange of tokens."""
        self.ep_group = self.gate.ep_group = group

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """``[..., hidden]``, of the same shape afterwards; sets ``l_aux`` and ``exp_counts``."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routes: Routes = self.gate(tokens, used_token, True)
        self.l_aux = routes.aux_loss
        self.exp_counts = routes.counts
        width = tokens.shape[1]
        slots = buffer_slots(routes.experts, routes.rows, routes.num_experts, routes.capacity)
        buffers = fill_buffers(tokens, slots, routes.num_experts, routes.capacity)
        arrived = self._exchanged(buffers.view(self.ep_size, -1, routes.capacity, width))
        outputs = self._exchanged(self.experts(arrived)).reshape(-1, width)
        return combine_rows(outputs, slots, routes.weights, len(tokens)).reshape(hidden.shape)

    def _exchanged(self, buffers: Tensor) -> Tensor:
        if self.ep_size == 1:
            return buffers
        if self.ep_group is None:
            raise ConfigError(f"MoE with ep_size={self.ep_size} has no ranks yet; give the model to initialize first")
        return exchange_parts(buffers, self.ep_group)


class MoE(nn.Module):
    """Layer with ``num_experts`` copies of ``expert``, each token being sent to ``k`` of them.

    ``ep_size``: ranks that share out the experts. An expert takes at most ``capacity_factor`` * ``k`` * tokens /
    experts tokens of a rank (``eval_capacity_factor`` in evaluation), at least ``min_capacity``, and all with
    ``drop_tokens=False``; see ``gating``. ``use_residual``: weight the output, and that of one more expert for all
    tokens, by a learned softmax (Rajbhandari et al. 2022). ``noisy_gate_policy``: Jitter multiplies the gate's input by
    random numbers near 1, RSample draws the expert (k=1).

    Errors: ``ConfigError`` for an unknown policy, and for use_tutel and expert tensor parallelism; ``LayoutError`` if
    ``num_experts`` cannot be divided.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (
            ("use_tutel", use_tutel),
            ("enable_expert_tensor_parallelism", enable_expert_tensor_parallelism),
        ):
            if value:
                raise ConfigError(f"MoE: {name}=True is not supported; set it to False")
        if noisy_gate_policy not in POLICIES:
            raise ConfigError(f"MoE: noisy_gate_policy={noisy_gate_policy!r} must be None, 'Jitter' or 'RSample'")
        if num_experts % ep_size:
            raise LayoutError(f"MoE: num_experts={num_experts} cannot be divided by ep_size={ep_size}; use a divisor")
        self.use_residual = use_residual
        self.ep_size = ep_size
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        experts = LocalExperts(expert, self.num_local_experts, self.expert_group_name)
        capacities = (capacity_factor, eval_capacity_factor, min_capacity)
        gate = TopKGate(hidden_size, num_experts, k, *capacities, noisy_gate_policy, drop_tokens, use_rts)
        gate.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.deepspeed_moe = GatedExperts(gate, experts, ep_size)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Any, Any]:
        """Return the output, the loss that balances the load, and the number of tokens of each expert."""
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = self.coefficient(hidden_states).softmax(-1)
            output = output * share[..., :1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def _layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Yield the layers of ``model`` whose experts are shared out over ranks."""
    return ((n, m) for n, m in model.named_modules() if isinstance(m, MoE) and m.ep_size > 1)


def expert_size_of(model: nn.Module) -> int:
    """Return the number of ranks that share out the experts of ``model``; 1 without layers ``MoE``.

    Errors: ``LayoutError`` for layers with different sizes.
    """
    sizes = {layer.ep_size for _, layer in _layers(model)}
    if len(sizes) > 1:
        raise LayoutError(f"MoE: layers have ep_size {sorted(sizes)}; use one size, or 1")
    return max(sizes, default=1)


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of experts that other ranks do not have."""
    return {parameter for _, layer in _layers(model) for parameter in layer.deepspeed_moe.experts.parameters()}


def connect_experts(model: nn.Module, groups: ParallelGroups) -> None:
    """Give the layers of ``model`` their groups; make experts equal on the ranks that have the same ones.

    Errors: ``LayoutError`` if ``ep_size`` is not the group's size, or for a parameter that is a single number.
    """
    group = groups.group("ep")
    copies = groups.group("edp")
    if expert_size_of(model) != group.size():
        raise LayoutError(f"MoE: ep_size={expert_size_of(model)} with expert_model_parallel_size={group.size()}")
    for name, layer in _layers(model):
        layer.deepspeed_moe.connect(group)
        for label, parameter in layer.deepspeed_moe.experts.named_parameters():
            if parameter.dim() == 0:
                raise LayoutError(f"{name}: {label} of an expert is a single number; give it one dimension")
            # Expert i of all ranks, one below the other.
            shape = (parameter.shape[0] * group.size(), *parameter.shape[1:])
            of_ranks = split(shape, 0, group.rank(), group.size(), axis="ep")
            spec: Any = split_over(of_ranks, replica_axes=("edp",))
            vars(parameter)["shard_spec"] = spec
            if copies.size() > 1:
                broadcast_(parameter.data, dist.get_global_rank(process_group(copies), 0), copies)


def with_all_experts(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Replace expert i of all ranks, stacked as one tensor in ``state``, by one tensor for each expert of the model."""
    prefixes = {f"{name}.deepspeed_moe.experts.{LIST}.".lstrip("."): layer for name, layer in _layers(model)}
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix = next((path for path in prefixes if name.startswith(path)), None)
        if prefix is None:
            result[name] = tensor
            continue
        number, _, label = name.removeprefix(prefix).partition(".")
        layer = prefixes[prefix]
        for rank, weights in enumerate(tensor.chunk(layer.ep_size)):
            result[f"{prefix}{rank * layer.num_local_experts + int(number)}.{label}"] = weights
    return result


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether ``m`` has a layer ``MoE``, and the number of experts of the first one."""
    first = next((layer for layer in m.modules() if isinstance(layer, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a group of an optimizer has the parameters of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters outside of experts, and those of experts."""
    listed = list(params)
    return [p for p in listed if not is_moe_param(p)], [p for p in listed if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Remove the parameters of experts from the groups, and append groups of them with ``moe`` set.

    A group of experts has at most ``max_group_size`` elements, unless one parameter has more.
    """
    if not isinstance(param_groups, dict | list | tuple):
        raise ValueError(f"param_groups={type(param_groups).__name__} must be a group, or a list of groups")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    names = sorted({p.group_name for group in groups for p in group["params"] if is_moe_param(p)})
    added: list[dict[str, Any]] = []
    for group in groups:
        dense, experts = split_params_into_shared_and_expert_params(group["params"])
        for name in names:
            lists: list[list[nn.Parameter]] = [[]]
            for parameter in (p for p in experts if vars(p)["group_name"] == name):
                size = sum(p.numel() for p in lists[-1]) + parameter.numel()
                if lists[-1] and max_group_size is not None and size > max_group_size:
                    lists.append([])
                lists[-1].append(parameter)
            added += [{**group, "name": name, "moe": True, "params": members} for members in lists if members]
        group["params"] = dense
    return groups + added


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return groups of parameters, or of groups, with experts in groups of their own."""
    if model_parameters and isinstance(model_parameters[0], Tensor):
        model_parameters = [{"params": model_parameters, "name": "dense-params"}]
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
