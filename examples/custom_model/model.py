"""A custom model built from the parallel layers. It predicts the next item in a sequence, for example in a web shop.

The model embeds the items, applies blocks with a moving average over time, and computes logits of all items:

block(x)_t = x_t + W_down silu(m_t),   m_t = a m_{t-1} + (1 - a) W_up norm(x_t),   a = sigmoid(decay), per channel

Activations are [s, b, h]. A custom model has to specify three things: how its own parameters are split (``decay`` over
tp, like the channels), which gradients are partial (those of the norms with sequence parallelism, because each rank
processes a part of the sequence), and parameter names that do not depend on the pipeline stage. With context
parallelism, modules that need other tokens gather them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import gather_from_sequence
from megatron_core.parallel.groups import ALONE, Group
from megatron_core.parallel.initialization import initialise_by_name
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.parallel.sharding import allocate, replicated, split
from megatron_core.tensor_parallel import (
    ColumnParallelLinear,
    ModelParallelConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class NextItemConfig:
    """Sizes of the model, and the seed of its weights."""

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


class MovingAverage(nn.Module):
    """An exponential moving average over time, with a learned decay for each channel.

    Ranks of ``cp_group`` share each sequence.
    """

    def __init__(
        self, size: int, options: ModelParallelConfig, tp_index: int, tp_size: int, cp_group: Group = ALONE
    ) -> None:
        super().__init__()
        self.cp_group = cp_group
        self.decay = allocate(split((size,), 0, tp_index, tp_size), options.params_dtype, options.device)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, c]``, s local tokens -> the same; m_t = sum_u (1 - a) a^(t - u) x_u over u <= t on all ranks."""
        keep = torch.sigmoid(self.decay)
        whole, size = gather_from_sequence(x, self.cp_group), self.cp_group.size()
        ranks = [SequenceSplit(cp_rank=rank, cp_size=size) for rank in range(size)]
        steps = [each.positions(len(whole), x.device) for each in ranks]  # two runs of positions per rank
        age = (steps[self.cp_group.rank()][:, None] - torch.cat(steps)[None, :])[..., None]
        weights = torch.where(age >= 0, (1.0 - keep) * keep ** age.clamp_min(0), 0.0)
        return torch.einsum("tuc,ubc->tbc", weights.to(x.dtype), whole)


class Block(nn.Module):
    """Norm, up projection, moving average, down projection, and a residual connection."""

    def __init__(self, config: NextItemConfig, groups: ParallelGroups, options: ModelParallelConfig) -> None:
        super().__init__()
        index, size, tp = groups.index("tp"), groups.size("tp"), groups.group("tp")
        self.norm = Norm(config.hidden_size, options, index)
        self.up = ColumnParallelLinear(
            config.hidden_size, config.inner_size, config=options, gather_output=False, tp_group=tp
        )
        self.average = MovingAverage(config.inner_size, options, index, size, groups.group("cp"))
        self.down = RowParallelLinear(
            config.inner_size, config.hidden_size, config=options, input_is_parallel=True, tp_group=tp
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallel) -> the same."""
        # The up projection gathers the sequence: the average covers all positions, for the channels of this rank.
        averaged = self.average(self.up(self.norm(x))[0])
        return x + self.down(nn.functional.silu(averaged))[0]


class NextItem(nn.Module):
    """One pipeline stage: consecutive blocks; the first stage also has the embedding, the last one the output layer."""

    def __init__(
        self, config: NextItemConfig, stage: int, num_stages: int, groups: ParallelGroups, options: ModelParallelConfig
    ) -> None:
        super().__init__()
        self.config, self.tp_group, self.sequence_parallel = config, groups.group("tp"), options.sequence_parallel
        blocks = range(stage * config.num_blocks // num_stages, (stage + 1) * config.num_blocks // num_stages)
        self.table = self.scores = self.norm = None
        if stage == 0:
            self.table = VocabParallelEmbedding(
                config.items,
                config.hidden_size,
                config=options,
                reduce_scatter_embeddings=options.sequence_parallel,
                tp_group=self.tp_group,
            )
        self.blocks = nn.ModuleDict({str(number): Block(config, groups, options) for number in blocks})
        if stage == num_stages - 1:
            self.norm = Norm(config.hidden_size, options, groups.index("tp"))
            self.scores = ColumnParallelLinear(
                config.hidden_size,
                config.items,
                config=options,
                bias=False,
                gather_output=False,
                tp_group=self.tp_group,
            )
        for name, parameter in self.named_global_parameters():
            initialise_by_name(parameter, initial_value(name), config.seed, name)

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by global name; blocks already have global numbers, so the names are the same on every stage."""
        return self.named_parameters()

    def forward(self, seen: Tensor, following: Tensor, hidden: Tensor | None) -> Tensor:
        """Hidden states ``[s, b, h]``, or on the last stage losses ``[s, b]``; ``seen``, ``following``: ``[b, s]``."""
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
    """The initialisation of a parameter."""
    if name.endswith("norm.weight"):
        return nn.init.ones_
    if name.endswith("bias"):
        return nn.init.zeros_
    return lambda tensor: nn.init.normal_(tensor, std=0.2)
