"""This rank's part of the trajectories of a step: its rows, and of them its positions."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.features.experts.layer import routed_rows
from megatron_core.features.experts.replay import RouterReplay
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.post_training.objectives import TokenObjective
from megatron_core.post_training.token_batch import TokenBatch
from megatron_core.post_training.trajectories import PackedRows, batch_of, check_experts
from megatron_core.training.setup import Run


def score_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of log-probabilities and values: float64 if the model computes in it, else float32."""
    return torch.float64 if config.training.compute_dtype == "float64" else torch.float32


def gather_by_data_rank(rows: list[Any] | None, data_rank: int, device: torch.device) -> list[list[Any]]:
    """The rows of each data-parallel rank, on all ranks; None on those that repeat the rows of others."""
    gathered = map(json.loads, gather_from_all_ranks(json.dumps([data_rank, rows]), device))
    by_rank = {number: rows_of_rank for number, rows_of_rank in gathered if rows_of_rank is not None}
    return [by_rank[number] for number in sorted(by_rank)]


class StepData:
    """The micro-batches of a data-parallel rank, cut as ``BatchLoader`` and ``MicroBatch`` cut those of a training.

    Micro-batch m of data-parallel rank r has the rows (m dp + r) b + [0, b) for micro-batches of b rows.
    """

    def __init__(self, run: Run, rows: PackedRows, names: Sequence[str]) -> None:
        """``names``: the values of tokens that an objective may read."""
        self._run = run
        self._rows = rows
        self._size = run.config.training.micro_batch_size
        self.batches: list[MicroBatch] = []
        self.tokens: list[TokenBatch] = []
        self._numbers: list[Tensor] = []
        self.router_replays: dict[int, RouterReplay] = {}
        """The recorded experts of this rank's tokens, by micro-batch."""
        device = run.world.device
        for micro in range(len(rows.rows) // (self._size * run.groups.size("dp"))):
            own_rows = self._rows_of(micro)
            batch = batch_of([rows.arrays(row, names) for row in own_rows])
            batch["sample_index"] = torch.tensor(own_rows) + run.state.consumed_samples
            micro_batch = MicroBatch.of(batch, run.split, device, later=run.config.model.added_layers)
            numbers = run.split.local(batch["trajectory"]).to(device)
            # From the whole rows, so that context-parallel ranks, which have other positions of them, agree.
            present = batch["trajectory"].unique()
            present = present[present >= 0].to(device)
            inner = torch.searchsorted(present, numbers.clamp_min(0))
            dtype = score_dtype(run.config)
            self.batches.append(micro_batch)
            self._numbers.append(numbers)
            self.tokens.append(
                TokenBatch(
                    mask=micro_batch.loss_mask,
                    trajectory=inner.where(numbers >= 0, len(present)),
                    num_trajectories=len(present) + 1,
                    values={name: run.split.local(batch[name]).to(device, dtype) for name in names},
                    cp_group=run.groups.group("cp"),
                )
            )

        model = run.config.model.section(MoEConfig)
        layers = model.expert_layers
        choices = model.moe_router_topk
        if check_experts(rows.trajectories, len(layers), choices, model.num_experts or 0):
            for micro in range(len(self.batches)):
                experts = [rows.experts(row, len(layers), choices) for row in self._rows_of(micro)]
                self.router_replays[micro] = self._replay(torch.from_numpy(np.stack(experts)))

    def _replay(self, experts: Tensor) -> RouterReplay:
        """The part of ``[b, length, layers, k]`` that this rank routes."""
        split = self._run.split
        local = split.local(experts).transpose(0, 1).to(self._run.world.device)
        if split.sequence_parallel:
            local_rows = split.residual(local)
        else:
            local_rows = local[routed_rows(len(local), self._run.groups.group("tp"))]
        by_layer = local_rows.unbind(2)
        layers = self._run.config.model.section(MoEConfig).expert_layers
        return RouterReplay(dict(zip(layers, by_layer, strict=True)))

    def _rows_of(self, micro: int) -> list[int]:
        """The rows of a micro-batch of this rank."""
        groups = self._run.groups
        first = (micro * groups.size("dp") + groups.index("dp")) * self._size
        return list(range(first, first + self._size))

    @cached_property
    def _learned(self) -> Tensor:
        """Number of learned tokens of each trajectory, float64."""
        return torch.tensor([trajectory.num_learned for trajectory in self._rows.trajectories], dtype=torch.float64)

    def weights(self, objective: TokenObjective) -> list[Tensor]:
        """For each micro-batch factors ``[b, n]`` by which the mean over all learned tokens of the global batch becomes
        the mean of the objective."""
        learned = self._learned
        total = float(learned.sum())
        with_tokens = int((learned > 0).sum())
        factors = {"tokens": 1.0, "sum": total, "trajectories": total / with_tokens}
        if objective.length is not None:
            factors["length"] = total / (with_tokens * objective.length)
        by_trajectory = torch.full_like(learned, factors[objective.mean_over])
        if objective.mean_over == "trajectories":
            by_trajectory = by_trajectory / learned.clamp_min(1.0)
        by_trajectory = by_trajectory.to(self._run.world.device, score_dtype(self._run.config))
        return [
            by_trajectory[numbers.clamp_min(0)] * batch.mask
            for numbers, batch in zip(self._numbers, self.tokens, strict=True)
        ]

    def collect(self, outputs: Mapping[int, Tensor]) -> list[Tensor]:
        """Gather numbers ``[b, n]`` of the micro-batches of all ranks: those of each trajectory's learned tokens.

        ``outputs``: by micro-batch, on ranks with the last stage.
        """
        run = self._run
        sizes = [trajectory.num_learned for trajectory in self._rows.trajectories]
        result = torch.zeros(sum(sizes), dtype=score_dtype(run.config), device=run.world.device)
        if run.split.owns_loss:
            for micro, output in outputs.items():
                places = self._places(micro, sizes)
                is_learned = places >= 0
                result[places[is_learned]] = output[is_learned].to(result.dtype)
        # Every element has one owner, and adding zeros keeps its bits.
        all_reduce_(result, run.groups.group(WORLD))
        return list(result.split(sizes))

    def _places(self, micro: int, sizes: Sequence[int]) -> Tensor:
        """``[b, n]``, the index of each local position among all learned tokens; -1 where none is learned."""
        rows = self._rows
        ends = torch.tensor(sizes).cumsum(0)
        places = torch.full((self._size, rows.length), -1)
        for place, row in zip(places, self._rows_of(micro), strict=True):
            for number, start in zip(rows.rows[row], rows.starts(row), strict=True):
                learned = torch.tensor(rows.trajectories[number].mask).nonzero()[:, 0]
                place[start + learned] = ends[number] - sizes[number] + torch.arange(len(learned))
        return self._run.split.local(places).to(self._run.world.device)
