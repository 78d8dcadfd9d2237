"""Weights of ``fully_shard``: each rank keeps rows of every parameter as DTensors; units are gathered as a whole.

A unit's rows are one flat tensor, so that a gather and a sum of gradients are one message each.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_core.any_model.row_optimizer import MARK
from megatron_core.data_parallel.awaited_parameter import Arrival
from megatron_core.data_parallel.split_parameter import acquire, release
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_, reduce_scatter_flat_
from megatron_core.parallel.groups import ALONE, Group
from megatron_core.parallel.handles import Done, Handle

ALIGNED = 8
"""Parameters whose rows are a multiple of this number of elements come first: their whole weights start aligned."""


@dataclass(eq=False)
class ShardChoices:
    """The arguments of one call of ``fully_shard``, and what its modules' methods have set since."""

    modules: list[nn.Module]
    mesh: DeviceMesh
    device: torch.device
    group: Group
    """Ranks that share the rows."""
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None
    """None: True, except for the outermost module."""
    instances: Group = ALONE
    """Ranks with the same rows in other copies of the model (hybrid sharding)."""
    keeps_on_host: bool = False
    reshard_after_backward: bool = True
    sums_gradients: bool = True
    sums_unused: bool = False
    """Whether parameters without a gradient on this rank take part in sums, with zeros."""
    divisor: float | None = None
    """Divisor of the sums of gradients; by default the number of ranks."""
    rows: "list[ParameterRows]" = field(default_factory=list)


class ParameterRows:
    """One parameter: ``sharded``, a DTensor of this rank's rows, and ``whole``, which modules read while they run.

    ``slots``: the modules, and names in them, in which it is registered.
    """

    def __init__(self, name: str, parameter: nn.Parameter, slots: list[tuple[nn.Module, str]], choices: ShardChoices):
        self.name = name
        self.slots = slots
        size = choices.group.size()
        per_rank = -(-parameter.shape[0] // size)
        first = min(choices.group.rank() * per_rank, parameter.shape[0])
        rows = parameter.detach()[first : first + per_rank]
        device = "cpu" if choices.keeps_on_host else choices.device
        local = rows.contiguous() if rows.is_meta else rows.to(device, copy=True, memory_format=torch.contiguous_format)
        placements = [Replicate()] * (choices.mesh.ndim - 1) + [Shard(0)]
        shape = parameter.shape
        stride = torch.empty(shape, device="meta").stride()
        sharded = DTensor.from_local(local, choices.mesh, placements, run_check=False, shape=shape, stride=stride)
        self.sharded: Any = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        vars(self.sharded).update({key: value for key, value in vars(parameter).items() if key[0] != "_"})
        self.block = per_rank * parameter[:1].numel() if per_rank else 0
        """Elements of each rank's rows, with the padding of the last ranks."""
        self.whole: nn.Parameter
        self.local: Tensor
        """This rank's rows, a view of the unit's shard."""
        self._kept: Tensor | None = None
        """Sum of gradients that has not been sent, in the dtype of the messages."""
        self._use(self.sharded)

    def _use(self, sharded: Any) -> None:
        self.sharded = sharded
        vars(sharded)[MARK] = True
        self.register(sharded)

    def register(self, parameter: nn.Parameter) -> None:
        """Make ``parameter`` the parameter of all its modules."""
        for module, name in self.slots:
            module._parameters[name] = parameter

    def bind(self, shard: Tensor, memory: Tensor) -> None:
        """Move the rows into ``shard``, and make ``whole`` a view of ``memory``."""
        local = local_of(self.sharded)
        self.local = shard[: local.numel()].view(local.shape)
        # Own memory first, then .data: with a common version counter, gathers would be modifications for autograd.
        self.whole = nn.Parameter(memory.new_empty(0), requires_grad=self.sharded.requires_grad)
        self.whole.data = memory[: self.sharded.numel()].view(self.sharded.shape)
        self.adopt()

    def adopt(self) -> None:
        """Use the registered parameter, whose memory ``to_empty`` or ``load_state_dict(assign=True)`` exchanges."""
        module, name = self.slots[0]
        registered = module._parameters[name]
        if registered is not self.whole and registered is not self.sharded:
            if not isinstance(registered, DTensor) or registered.shape != self.sharded.shape:
                raise ConfigError(f"fully_shard: {self.name} was replaced by another tensor; assign a DTensor like it")
            self._use(registered)
        local = local_of(self.sharded)
        if local is self.local:
            return
        if local.is_meta:
            raise ConfigError(
                f"fully_shard: {self.name} is on the meta device; call model.to_empty(device=...) and fill the weights "
                "before the first forward"
            )
        if local.dtype != self.local.dtype:
            raise ConfigError(
                f"fully_shard: {self.name} was converted to {local.dtype} after the first forward; convert the model "
                "before it"
            )
        self._use(self.sharded)  # to_empty discards attributes
        self.local.copy_(local)
        self.sharded._local_tensor = self.local

    def take_gradient(self) -> Tensor | None:
        """Return the gradient on this rank that has not been sent, and forget it."""
        self.keep_gradient(None)
        gradient = self._kept
        self._kept = None
        return gradient

    def keep_gradient(self, dtype: torch.dtype | None) -> None:
        """Add the gradient to the sum of micro-batches, in ``dtype`` if this is wider than the weights."""
        gradient = self.whole.grad
        if gradient is None:
            return
        self.whole.grad = None
        if self._kept is not None:
            self._kept.add_(gradient)
        else:
            self._kept = gradient if dtype is None else gradient.to(dtype)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has not been sent."""
        return self.whole.grad is not None or self._kept is not None

    def add_gradient(self, total: Tensor) -> None:
        """Add the rows of a sum over all ranks to the DTensor's gradient."""
        if self.sharded.grad is None:
            self.sharded.grad = DTensor(total, self.sharded._spec, requires_grad=False)
        else:
            local_of(self.sharded.grad).add_(total)


def local_of(tensor: Any) -> Tensor:
    """Return the rows of a DTensor on this rank, without a record by autograd."""
    return tensor._local_tensor


class RowBucket:
    """The rows of a unit's parameters of one dtype in a flat ``shard``; it has the methods of ``Bucket`` for units."""

    # Gradients stay where autograd stores them until they are copied, once, into the message.
    splits_weights = True
    splits_grads = True
    compresses = False

    def __init__(self, unit: int, rows: list[ParameterRows], choices: ShardChoices) -> None:
        self.unit = unit
        self.choices = choices
        self.rows = sorted(rows, key=lambda row: row.block % ALIGNED > 0)
        self._blocks = [row.block for row in self.rows]
        first = local_of(rows[0].sharded)
        total = sum(self._blocks)
        size = choices.group.size()
        cast_dtype = choices.policy.param_dtype if first.is_floating_point() else None
        self.dtype = cast_dtype or first.dtype
        device = "cpu" if choices.keeps_on_host else choices.device
        self.shard = torch.zeros(total, dtype=first.dtype, device=device, pin_memory=self._is_pinned)
        self.flat = torch.empty(size * total, dtype=self.dtype, device=choices.device)
        start = 0
        for row in self.rows:
            row.bind(self.shard[start:], self.flat[size * start :])
            start += row.block
        by_parameter = self.flat.split([size * block for block in self._blocks])
        self._by_parameter = [flat.view(size, -1) for flat in by_parameter]
        self._arriving: Tensor | None = None
        self._has_started = False
        self.gathering: Handle | Arrival = Done()
        self._reducing: Handle = Done()
        self._summed: list[ParameterRows] = []
        self._sum = self._wire = self.shard[:0]
        self._late_divisor = 1.0
        release(self.flat)

    @property
    def _is_pinned(self) -> bool:
        return self.choices.keeps_on_host and self.choices.device.type == "cuda"

    # Weights.

    @property
    def freed(self) -> "RowBucket":
        """Reads between units: a freed unit's modules have the DTensors, with which torch refuses to compute."""
        return self

    def restore(self) -> None:
        """Nothing: ``finish_gather`` registers the weights and their release removes them; programs use DTensors."""

    close = prefetch_weights = keep_for_users = restore

    @property
    def is_whole(self) -> bool:
        """Whether the weights have memory."""
        return self._has_started

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to gather the weights unless they are already in memory."""
        if self._has_started:
            return
        for row in self.rows:
            row.adopt()
            row.whole.requires_grad_(row.sharded.requires_grad)
        self._has_started = True
        acquire(self.flat)
        shard = self.shard.to(device=self.flat.device, dtype=self.dtype)
        is_one_block = len(self.rows) == 1 or self.choices.group.size() == 1
        self._arriving = self.flat if is_one_block else torch.empty_like(self.flat)
        if self.choices.group.size() == 1:
            self.flat.copy_(shard)
        self.gathering = all_gather_flat_(self._arriving, shard, self.choices.group, async_op=True)

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Wait for the gathered weights and register them in the modules."""
        if self._arriving is None:
            return
        self.gathering.wait()
        self.gathering = Done()
        if self._arriving is not self.flat:
            by_rank = self._arriving.view(self.choices.group.size(), -1)
            torch.split_with_sizes_copy(by_rank, self._blocks, dim=1, out=self._by_parameter)
        self._arriving = None
        for row in self.rows:
            row.register(row.whole)

    def release_weights(self) -> None:
        """Free the whole weights and register the DTensors."""
        if self._has_started:
            self.finish_gather()
            self._has_started = False
            for row in self.rows:
                row.register(row.sharded)
            release(self.flat)

    # Gradients.

    @property
    def has_grads(self) -> bool:
        """Whether gradients of this rank have not been sent."""
        return any(row.has_gradient for row in self.rows)

    def keep_gradients(self) -> None:
        """Keep the gradients of a backward that does not sum them."""
        for row in self.rows:
            row.keep_gradient(self.choices.policy.reduce_dtype)

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Start to sum the gradients over the ranks, if the module requires it."""
        if not self.choices.sums_gradients:
            return
        self.finish_reduce()
        gradients: list[Tensor] = []
        for row in self.rows:
            gradient = row.take_gradient()
            if gradient is None and self.choices.sums_unused and row.whole.requires_grad:
                gradient = torch.zeros(row.sharded.shape, dtype=self.dtype, device=self.flat.device)
            if gradient is not None:
                gradients.append(gradient)
                self._summed.append(row)
        if not gradients:
            return
        size = self.choices.group.size()
        dtype = self.choices.policy.reduce_dtype or self.dtype
        early, self._late_divisor = self._divisors(dtype)
        self._wire = _by_rank(gradients, [row.block for row in self._summed], size, dtype)
        if early != 1:
            self._wire = self._wire / early
        self._sum = self._wire if size == 1 else self._wire.new_empty(self._wire.numel() // size)
        self._reducing = reduce_scatter_flat_(self._sum, self._wire, self.choices.group, async_op=True)

    def _divisors(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the divisors before and after a sum: float16 divides by a part before it, against overflow."""
        size = self.choices.group.size() * self.choices.instances.size()
        divisor = size if self.choices.divisor is None else self.choices.divisor
        early = 1.0
        while dtype == torch.float16 and early * early < divisor:
            early *= 2
        return early, divisor / early

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the sum and add it to the gradients of the DTensors."""
        if not self._summed:
            return
        self._reducing.wait()
        self._reducing = Done()
        total = self._sum
        all_reduce_(total, self.choices.instances)
        if self._late_divisor != 1:
            total = total / self._late_divisor
        total = total.to(device=self.shard.device, dtype=self.shard.dtype)
        start = 0
        for row in self._summed:
            row.add_gradient(total[start : start + row.local.numel()].view(row.local.shape))
            start += row.block
        self._summed = []
        self._sum = self._wire = self.shard[:0]


def _by_rank(gradients: list[Tensor], blocks: list[int], size: int, dtype: torch.dtype) -> Tensor:
    """Return the message of a reduce-scatter: for each rank its rows of every gradient, the last rows padded."""
    first = gradients[0]
    total = sum(blocks)
    is_even = all(gradient.numel() == size * block for gradient, block in zip(gradients, blocks, strict=True))
    if is_even and (size == 1 or len(gradients) == 1):
        flat_parts = [gradient.reshape(-1).to(dtype) for gradient in gradients]
        return flat_parts[0] if len(flat_parts) == 1 else torch.cat(flat_parts)
    make = first.new_empty if is_even else first.new_zeros
    wire = make((size, total), dtype=dtype)
    start = 0
    for gradient, block in zip(gradients, blocks, strict=True):
        target = wire[:, start : start + block]
        start += block
        flat = gradient.reshape(-1)
        whole_ranks = flat.numel() // block if block else 0
        target[:whole_ranks] = flat[: whole_ranks * block].view(whole_ranks, block)
        remainder = flat[whole_ranks * block :]
        if remainder.numel():
            target[whole_ranks, : remainder.numel()] = remainder
    return wire.view(-1)
