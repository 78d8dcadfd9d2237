"""Post-training that a program drives: log-probabilities, and steps on an objective of them, in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.config.rules_data import SOURCES
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError, DataError
from megatron_core.parallel import World, start_world
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.post_training.objectives import TokenObjective
from megatron_core.post_training.policy_loss import PolicyLoss, Scores
from megatron_core.post_training.token_batch import TokenBatch
from megatron_core.post_training.trajectories import PackedRows, RowRoom, Trajectory, batch_of, value_names
from megatron_core.training.driver import StepRates, run_plan
from megatron_core.training.plans import StepSize
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import StepInput, StepResult, message_lengths, model_step, step_rates, train_on_batches
from megatron_core.transformer.layer_spec import LayerSpecs, layer_spec

NUMBERS = "trajectory"
"""The entry of a batch with the number of each token's trajectory; -1 for padding."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of the learned tokens of each trajectory, in order: float32 or wider, equal on all ranks."""

    log_probs: list[Tensor]
    entropy: list[Tensor] | None
    """Entropy of each token's distribution in nats, on request."""


@dataclass
class _Prepared:
    """This rank's part of the rows of a step."""

    batches: list[MicroBatch] = field(default_factory=list)
    tokens: list[TokenBatch] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    """By micro-batch ``[b, n]``: the number of each token's trajectory, or -1."""


class Trainer:
    """A model and its optimizer in any layout of ``RunConfig``, for programs with a loop of their own.

    Every rank calls the same methods with the same trajectories (reinforcement learning is a few numbers for each
    token, so that every rank has all of them); each rank computes its part. With ``pack`` several trajectories share a
    row of ``seq_length`` positions, and do not attend to each other.

    Errors: ``ConfigError`` for settings that are not legal, ``DataError`` for trajectories that are not.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World | None = None,
        *,
        pack: bool = True,
        layer_specs: LayerSpecs = layer_spec,
    ) -> None:
        """``world``: ranks of a program that has joined torch.distributed itself; else the launcher's, which join
        here."""
        config = _without_data(config)
        joins = world is None
        world = World.from_environment() if world is None else world
        check(config, world.size)
        parallel = config.parallel
        if joins:
            start_world(
                world, backend=parallel.distributed_backend, timeout_minutes=parallel.distributed_timeout_minutes
            )
        self.run: Run = set_up(config, world, layer_specs=layer_specs, reads_data=False)
        if self.run.attempts.by_copy or config.num_groups > 1:
            raise ConfigError("post-training computes each step once, in one group; use --rerun-mode disabled, and no "
                              "outer groups")  # fmt: skip
        tensor_ranks = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        context_chunks = 2 * parallel.context_parallel_size if parallel.context_parallel_size > 1 else 1
        longest = config.data.seq_length
        self._room = RowRoom(longest, multiple=tensor_ranks * context_chunks, pack=pack)
        if parallel.layout_invariant:
            # Products have the shapes of generation, which computes whole chunks from the start of each text.
            chunk = longest // parallel.layout_invariant_chunks
            self._room = RowRoom(longest, align=chunk, whole=True, pack=pack)

    # The model.

    def log_probs(
        self, trajectories: Sequence[Trajectory], *, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenScores:
        """Log-probabilities of the learned tokens under the present weights, without dropout and gradients.

        ``temperature``: log softmax(z / temperature), as the tokens were sampled.
        """
        _check_temperature(temperature)
        rows = self._rows(trajectories, ())
        mine = self._prepare(rows, ())
        run = self.run
        scores = Scores(run, temperature=temperature, with_entropy=with_entropy)
        last = len(run.layers) - 1
        logit_losses = scores.logit_losses(len(mine.batches))
        compute = model_step(run, run.stages, mine.batches, None, logit_losses=logit_losses)
        outputs: dict[int, Tensor] = {}

        def forward(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
            output = compute(stage, micro, hidden)
            if stage < last:
                return output
            outputs[micro] = -output
            return output.new_zeros(())

        modes = [stage.training for stage in run.stages.values()]
        for stage in run.stages.values():
            stage.eval()
        with torch.no_grad():
            plan = run.plans.evaluation(len(mine.batches))
            run_plan(run, plan, forward, lengths=message_lengths(mine.batches))
        for stage, mode in zip(run.stages.values(), modes, strict=True):
            stage.train(mode)
        log_probs = self._collect(rows, mine, outputs)
        return TokenScores(log_probs, self._collect(rows, mine, scores.entropies) if with_entropy else None)

    def train_on(
        self,
        trajectories: Sequence[Trajectory],
        objective: TokenObjective,
        *,
        lr: float | None = None,
        temperature: float = 1.0,
    ) -> StepResult:
        """Take one optimizer step on ``objective`` of all ``trajectories``; equal on all ranks.

        ``lr``: the learning rate, instead of that of the configured schedule.
        """
        _check_temperature(temperature)
        names = value_names(trajectories)
        rows = self._rows(trajectories, names)
        mine = self._prepare(rows, names)
        run = self.run
        size = StepSize(run.state.consumed_samples, len(rows.rows), len(mine.batches), rows.length)
        rates = step_rates(run, size) if lr is None else StepRates(lr, None, run.config.optimizer.weight_decay)
        weights = [self._weights(rows, objective, batch, numbers)
                   for batch, numbers in zip(mine.tokens, mine.numbers, strict=True)]  # fmt: skip
        scores = Scores(run, temperature=temperature, with_entropy=objective.uses_entropy)
        usual = run.objective
        run.objective = PolicyLoss(run, objective, mine.tokens, weights, scores)
        try:
            return train_on_batches(run, StepInput(size, mine.batches, rates))
        finally:
            run.objective = usual

    # Data.

    def _rows(self, trajectories: Sequence[Trajectory], names: Sequence[str]) -> PackedRows:
        """Pack the trajectories, after checking that all ranks have the same ones."""
        config = self.run.config
        if not trajectories:
            raise DataError("no trajectories; give at least one")
        at_once = config.training.micro_batch_size * self.run.groups.size("dp")
        rows = PackedRows.of(trajectories, self._room, at_once)
        self._check_tokens(trajectories)
        digest = rows.digest()
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=self.run.world.device)
        all_reduce_(extremes, self.run.groups.group(WORLD), maximum=True)
        largest, smallest = extremes.tolist()
        if largest != -smallest:
            raise DataError(
                "the trajectories differ between ranks: every rank must pass the same trajectories in the same order; "
                "sample with the same seed on all ranks, or send them to all ranks"
            )
        return rows

    def _check_tokens(self, trajectories: Sequence[Trajectory]) -> None:
        vocabulary = self.run.vocab_size
        for number, trajectory in enumerate(trajectories):
            if min(trajectory.tokens) < 0 or max(trajectory.tokens) >= vocabulary:
                raise DataError(f"trajectory {number} has token ids outside of the vocabulary, 0 to {vocabulary - 1}")

    def _prepare(self, rows: PackedRows, names: Sequence[str]) -> _Prepared:
        """Cut this rank's rows and their parts of sequences, as ``BatchLoader`` and ``MicroBatch`` do."""
        run = self.run
        size = run.config.training.micro_batch_size
        data_ranks = run.groups.size("dp")
        prepared = _Prepared()
        for micro in range(len(rows.rows) // (size * data_ranks)):
            first = (micro * data_ranks + run.groups.index("dp")) * size
            batch = batch_of([rows.arrays(row, names) for row in range(first, first + size)])
            batch["sample_index"] = torch.arange(first, first + size) + run.state.consumed_samples
            micro_batch = MicroBatch.of(batch, run.split, run.world.device, later=run.config.model.added_layers)
            numbers = run.split.local(batch[NUMBERS]).to(run.world.device)
            # Numbers within the micro-batch, from those of the whole rows, so that context-parallel ranks agree.
            present = batch[NUMBERS].unique()
            present = present[present >= 0].to(run.world.device)
            inner = torch.searchsorted(present, numbers.clamp_min(0))
            values = {name: run.split.local(batch[name]).to(run.world.device, _dtype_of(run.config)) for name in names}
            prepared.batches.append(micro_batch)
            prepared.numbers.append(numbers)
            prepared.tokens.append(
                TokenBatch(
                    mask=micro_batch.loss_mask,
                    trajectory=inner.where(numbers >= 0, len(present)),
                    num_trajectories=len(present) + 1,
                    values=values,
                    cp_group=run.groups.group("cp"),
                )
            )
        return prepared

    def _weights(self, rows: PackedRows, objective: TokenObjective, batch: TokenBatch, numbers: Tensor) -> Tensor:
        """Factors ``[b, n]`` by which the mean over all learned tokens becomes the mean of the objective."""
        learned = torch.tensor([trajectory.num_learned for trajectory in rows.trajectories], dtype=torch.float64)
        total = float(learned.sum())
        with_tokens = int((learned > 0).sum())
        factor = {"tokens": 1.0, "sum": total, "trajectories": total / with_tokens}
        if objective.length is not None:
            factor["length"] = total / (with_tokens * objective.length)
        weights = torch.full_like(learned, factor[objective.mean_over])
        if objective.mean_over == "trajectories":
            weights = weights / learned.clamp_min(1.0)
        return weights.to(batch.mask.device, _dtype_of(self.run.config))[numbers.clamp_min(0)] * batch.mask

    def _collect(self, rows: PackedRows, mine: _Prepared, outputs: dict[int, Tensor]) -> list[Tensor]:
        """Numbers ``[b, n]`` of this rank's micro-batches -> those of each trajectory's learned tokens, on all ranks."""
        run = self.run
        device = run.world.device
        positions = {}
        start = 0
        for number, trajectory in enumerate(rows.trajectories):
            positions[number] = start
            start += trajectory.num_learned
        result = torch.zeros(start, dtype=_dtype_of(run.config), device=device)
        if run.split.owns_loss:
            for micro, output in outputs.items():
                places = self._places(rows, micro, positions)
                wanted = places >= 0
                result[places[wanted]] = output[wanted].to(result.dtype)
        # Every element has one owner; adding zeros keeps its bits.
        all_reduce_(result, run.groups.group(WORLD))
        return list(result.split([trajectory.num_learned for trajectory in rows.trajectories]))

    def _places(self, rows: PackedRows, micro: int, positions: dict[int, int]) -> Tensor:
        """``[b, n]``, the index of each local token among all learned tokens; -1 where it is not learned."""
        run = self.run
        size = run.config.training.micro_batch_size
        first = (micro * run.groups.size("dp") + run.groups.index("dp")) * size
        places = torch.full((size, rows.length), -1)
        for row in range(size):
            for number, start in zip(rows.rows[first + row], rows.starts(first + row), strict=True):
                learned = torch.tensor(rows.trajectories[number].mask).nonzero()[:, 0]
                places[row, start + learned] = positions[number] + torch.arange(len(learned))
        return run.split.local(places).to(run.world.device)

    # State.

    def save(self) -> None:
        """Save model, optimizer and counters in the folder ``--save``."""
        if self.run.config.checkpoint.save is None:
            raise ConfigError("save=None: give a folder with --save")
        self.run.saver.save(self.run.state)

    def close(self) -> None:
        """Complete the checkpoints under way."""
        self.run.saver.close()


def _dtype_of(config: RunConfig) -> torch.dtype:
    """The dtype of log-probabilities and values: float64 if the model computes in it, else float32."""
    return torch.float64 if config.training.compute_dtype == "float64" else torch.float32


def _without_data(config: RunConfig) -> RunConfig:
    """The configuration of a run whose caller passes the data of each step."""
    for name in SOURCES:
        if value := getattr(config.data, name):
            raise ConfigError(f"{name}={value} is not read by Trainer: pass trajectories to its methods, and remove it")
    return replace(config, data=replace(config.data, dataloader_type="external"))


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"temperature={temperature} must be a finite number > 0")
