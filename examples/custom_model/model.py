"""A model that is no GPT, built from the parallel layers: what will a visitor of a shop look at next?

Items are embedded, a few blocks blur what was seen along time, and the last layer scores all items:

    block(x)_t = x_t + W_down silu(m_t),   m_t = a m_{t-1} + (1 - a) W_up norm(x_t),   a = sigmoid(memory), per channel

Activations are [s, b, h]. Three things in here are the model's own, and each says once how it is split:
the channels' ``memory`` (split over tp as the channels are), the norms (whole on every rank; with sequence parallelism
each rank sees a part of the sequence, so that their gradients are partial), and names that no stage changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.sharding import allocate, initialise_by_name, replicated, split
from megatron_core.tensor_parallel import (
    ColumnParallelLinear,
    ModelParallelConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class Shop:
    """Sizes of the model."""

    items: int = 96
    hidden_size: int = 32
    inner_size: int = 64
    num_blocks: int = 4
    seed: int = 7


class Norm(nn.Module):
    """Root mean square norm over channels (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, options: ModelParallelConfig, tp_index: int) -> None:
        super().__init__()
        spec = replicated((size,), tp_index, partial_grad=options.sequence_parallel)
        self.weight = allocate(spec, options.params_dtype, options.device)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h]`` -> the same."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)


class Memory(nn.Module):
    """A moving average along time, with a learned memory for each channel."""

    def __init__(self, size: int, options: ModelParallelConfig, tp_index: int, tp_size: int) -> None:
        super().__init__()
        self.memory = allocate(split((size,), 0, tp_index, tp_size), options.params_dtype, options.device)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, c]`` -> the same; m_t = sum_u (1 - a) a^(t - u) x_u over u <= t."""
        keep = torch.sigmoid(self.memory)
        steps = torch.arange(x.shape[0], device=x.device)
        age = (steps[:, None] - steps[None, :])[..., None]
        weights = torch.where(age >= 0, (1.0 - keep) * keep ** age.clamp_min(0), 0.0)
        return torch.einsum("tuc,ubc->tbc", weights.to(x.dtype), x)


class Block(nn.Module):
    """Norm, up, moving average, down; and the way around them."""

    def __init__(self, shop: Shop, groups: ParallelGroups, options: ModelParallelConfig) -> None:
        super().__init__()
        index, size, tp = groups.index("tp"), groups.size("tp"), groups.group("tp")
        self.norm = Norm(shop.hidden_size, options, index)
        self.up = ColumnParallelLinear(
            shop.hidden_size, shop.inner_size, config=options, gather_output=False, tp_group=tp
        )
        self.memory = Memory(shop.inner_size, options, index, size)
        self.down = RowParallelLinear(
            shop.inner_size, shop.hidden_size, config=options, input_is_parallel=True, tp_group=tp
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallel) -> the same."""
        # The up projection gathers the sequence, so that the average sees all of time on this rank's channels.
        remembered = self.memory(self.up(self.norm(x))[0])
        return x + self.down(nn.functional.silu(remembered))[0]


class NextItem(nn.Module):
    """One pipeline stage of the model: a run of blocks, the first with the table of items, the last with the scores."""

    def __init__(
        self, shop: Shop, stage: int, num_stages: int, groups: ParallelGroups, options: ModelParallelConfig
    ) -> None:
        super().__init__()
        self.shop, self.tp_group, self.sequence_parallel = shop, groups.group("tp"), options.sequence_parallel
        blocks = range(stage * shop.num_blocks // num_stages, (stage + 1) * shop.num_blocks // num_stages)
        self.table = self.scores = self.norm = None
        if stage == 0:
            self.table = VocabParallelEmbedding(
                shop.items,
                shop.hidden_size,
                config=options,
                reduce_scatter_embeddings=options.sequence_parallel,
                tp_group=self.tp_group,
            )
        self.blocks = nn.ModuleDict({str(number): Block(shop, groups, options) for number in blocks})
        if stage == num_stages - 1:
            self.norm = Norm(shop.hidden_size, options, groups.index("tp"))
            self.scores = ColumnParallelLinear(
                shop.hidden_size, shop.items, config=options, bias=False, gather_output=False, tp_group=self.tp_group
            )
        for name, parameter in self.named_global_parameters():
            initialise_by_name(parameter, initial_value(name), shop.seed, name)

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Blocks have their global numbers already, so that a stage's names are the model's."""
        return self.named_parameters()

    def forward(self, seen: Tensor, following: Tensor, hidden: Tensor | None) -> Tensor:
        """Hidden states, or on the last stage the loss of each place; ``seen`` and ``following`` are ``[b, s]``."""
        x = hidden
        if self.table is not None:
            x = self.table(seen)
            x = x if self.sequence_parallel else x.transpose(0, 1)
        for block in self.blocks.values():
            x = block(x)
        if self.scores is None:
            return x.contiguous()
        scores, _ = self.scores(self.norm(x))
        return vocab_parallel_cross_entropy(scores, following.transpose(0, 1), tp_group=self.tp_group)


def initial_value(name: str):
    """How a parameter is drawn."""
    if name.endswith("norm.weight"):
        return nn.init.ones_
    if name.endswith("bias"):
        return nn.init.zeros_
    return lambda tensor: nn.init.normal_(tensor, std=0.2)
