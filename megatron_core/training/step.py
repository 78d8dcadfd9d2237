"""A training step of a GPT, and its evaluation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_core.datasets import Dataset
from megatron_core.datasets.base import WholeRound, sources_of
from megatron_core.models import GPTModel
from megatron_core.models.gpt.model import HeadOptions, LogitLoss
from megatron_core.optimizer.clip import part_names
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.meter import METER
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.pipeline_parallel.executor import ForwardStep
from megatron_core.training.driver import (
    NO_HOOKS,
    StepHooks,
    StepOutcome,
    StepRates,
    StepWork,
    run_plan,
    sum_of,
    take_step,
)
from megatron_core.training.objective import count_tokens
from megatron_core.training.parts import Attempt
from megatron_core.training.plans import StepSize
from megatron_core.training.setup import Run
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses
from megatron_core.transformer.context import ForwardState
from megatron_core.transformer.layer_spec import mtp_loss_names


@dataclass(frozen=True)
class StepResult(StepOutcome):
    """The report of a training step; see ``StepOutcome`` for the ranks on which it is equal."""

    learning_rate: float
    loss_scale: float
    size: StepSize
    breakdown: Mapping[str, float]
    """Norms by layer and losses by source (``StepStatistics``)."""


@dataclass(frozen=True)
class StepInput:
    """The data and the rates of one step."""

    size: StepSize
    batches: Sequence[MicroBatch]
    """This rank's micro-batches."""
    rates: StepRates
    batches_of: Callable[[int], list[MicroBatch]] | None = None
    """Micro-batches of the data-parallel rank this number of places after this one, for runs that repeat steps."""


def train_step(run: Run, *, stop: bool = False, hooks: StepHooks = NO_HOOKS) -> StepResult:
    """Take the next step of ``run`` and advance its counters; ``stop``: this rank requests a stop after the step."""
    size = run.step_after(run.state.consumed_samples)
    with METER.phase("data"):
        batches = load_batches(run, size)

    def batches_of(shift: int) -> list[MicroBatch]:
        loader = run.loader(run.train_loader.dataset, shift)
        return run.micro_batches(loader.step(size.consumed_samples, size.num_microbatches, size.sequence_length))

    data = StepInput(size, batches, step_rates(run, size), batches_of)
    return train_on_batches(run, data, stop=stop, hooks=hooks)


def step_rates(run: Run, size: StepSize) -> StepRates:
    """The rates of the next step, which has ``size``."""
    state = run.state
    later = run.config.optimizer.lr_one_step_later
    step = (
        state.consumed_samples - state.skipped_samples + (0 if later else size.batch_size)
        if run.schedule.by_samples
        else state.iteration - state.skipped_iterations + (0 if later else 1)
    )
    decoupled_lr = None if run.decoupled_schedule is None else run.decoupled_schedule.lr(step)
    return StepRates(run.schedule.lr(step), decoupled_lr, run.schedule.weight_decay(step))


def train_on_batches(run: Run, data: StepInput, *, stop: bool = False, hooks: StepHooks = NO_HOOKS) -> StepResult:
    """As ``train_step``, on given micro-batches."""
    size = data.size
    rates = data.rates
    scale = run.optimizer.loss_scale.scale
    alone = any(run_part.is_alone() for run_part in run.parts)
    for run_part in run.parts:
        run_part.before_step()

    def compute(number: int = 0, *, shift: int = 0, discard: bool = False) -> Attempt:
        mine = data.batches
        if shift:
            assert data.batches_of is not None, "a run that repeats steps reads its data with a loader"
            mine = data.batches_of(shift)
        statistics = StepStatistics(run, shift)
        step_hooks = replace(hooks, statistics=statistics.own)
        if discard:
            step_hooks = replace(step_hooks, is_bad=lambda loss, norm: True)
        auxiliary = _auxiliary_losses(run, size, mine)
        is_spoiled = run.attempts.is_spoiled(number, shift)
        forward = forward_step(run, mine, auxiliary, statistics, spoiled=is_spoiled)
        work = StepWork(
            run.plans.training(len(mine)),
            forward,
            run.objective.count_terms(mine),
            message_lengths(mine),
            auxiliary,
        )
        outcome = take_step(run, work, rates, stop=stop, alone=alone, hooks=step_hooks)
        read = partial(statistics.read, outcome.statistics, scale)
        return Attempt(outcome, statistics.copies(outcome.statistics), read)

    # Take the step; then update the counters.
    attempt = run.attempts.take(compute)
    outcome = attempt.outcome
    _advance(run, size, skipped=outcome.skipped and not alone)
    if outcome.skipped and alone:
        run.optimizer.set_steps_taken(run.optimizer.steps_taken + 1)  # all groups have the same counters
    for run_part in run.parts:
        run_part.after_step(outcome)
    breakdown = attempt.statistics()
    for run_part in run.parts:
        breakdown |= run_part.metrics()
    for number, (loss, norm) in enumerate(outcome.groups):
        breakdown |= {f"lm loss by group/{number}": loss, f"grad-norm by group/{number}": norm}
    values = vars(outcome) | {"loss": breakdown.pop("lm loss", outcome.loss)}
    return StepResult(**values, learning_rate=rates.lr, loss_scale=scale, size=size, breakdown=breakdown)


def _auxiliary_losses(run: Run, size: StepSize, batches: Sequence[MicroBatch]) -> AuxiliaryLosses:
    model = run.config.model
    return AuxiliaryLosses(
        run.auxiliary_loss_names,
        size.batch_size // run.groups.outer.size(),
        counting_layers=model.counting_layers,
        counts=count_later_tokens(batches, mtp_loss_names(model)) | {"tokens": count_tokens(batches)},
    )


def leave_out_listed(run: Run) -> bool:
    """Leave out the next step's batch if a setting or a rollback lists it; return whether it was left out."""
    if run.state.iteration + 1 not in {*run.config.resilience.iterations_to_skip, *run.state.left_out}:
        return False
    size = leave_out_step(run)
    if run.world.rank == 0:
        print(f"note: iteration {run.state.iteration} is left out (samples up to {size.end - 1})", flush=True)
    return True


def leave_out_step(run: Run) -> StepSize:
    """Advance the counters past the next step's batch, which is not read; it counts as skipped."""
    size = run.step_after(run.state.consumed_samples)
    _advance(run, size, skipped=True)
    return size


def _advance(run: Run, size: StepSize, *, skipped: bool) -> None:
    state = run.state
    state.iteration += 1
    state.consumed_samples += size.batch_size
    state.consumed_tokens += size.tokens
    state.skipped_iterations += skipped
    state.skipped_samples += skipped * size.batch_size
    state.layout = run.layout
    state.validation_loss = None  # it was the loss of the weights before this step


@torch.no_grad()
def evaluate(run: Run, dataset: Dataset, iterations: int) -> float:
    """Sum of losses / number of their terms (tokens, or pairs of answers) over the first ``iterations`` batches, or
    over all samples of a ``WholeRound``.

    The batches are the same each time, so that results are comparable. Evaluation uses no dropout and changes neither
    generators nor counters.
    """
    for stage in run.stages.values():
        stage.eval()
    loader = run.loader(dataset)
    size = StepSize.of_evaluation(run.config, run.groups.replicas)
    if isinstance(dataset, WholeRound):
        iterations = -(-len(dataset) // size.batch_size)
    totals = torch.zeros(2, dtype=torch.float64, device=run.world.device)
    for iteration in range(iterations):
        batches = run.micro_batches(loader.step(iteration * size.batch_size, size.num_microbatches))
        plan = run.plans.evaluation(len(batches))
        losses = run_plan(run, plan, forward_step(run, batches), lengths=message_lengths(batches))
        totals[0] += sum_of(run, losses)
        # Terms are counted where losses are, on the last stage: other ranks would add the same tokens.
        totals[1] += run.objective.count_terms(batches) if losses and run.split.owns_loss else 0.0
    for stage in run.stages.values():
        stage.train()
    all_reduce_(totals, run.groups.group(WORLD))
    loss, tokens = totals.tolist()
    return loss / max(tokens, 1.0)


def load_batches(run: Run, size: StepSize) -> list[MicroBatch]:
    """Load this rank's micro-batches of the next step to its device, and prefetch those of the following step."""
    batches = run.train_loader.step(run.first_sample(size), size.num_microbatches, size.sequence_length)
    if run.state.iteration + 1 < run.total_iterations:
        # Worker processes read the next batch while this one is computed.
        after = run.step_after(size.end)
        run.train_loader.prefetch(run.first_sample(after), after.num_microbatches, after.sequence_length)
    return run.micro_batches(batches)


def count_later_tokens(batches: Sequence[MicroBatch], names: Sequence[str]) -> dict[str, Tensor]:
    """As ``count_tokens``, for the labels of multi-token prediction, by the name of each loss."""
    counts = [batch.later.masks.sum((1, 2), dtype=torch.float64) for batch in batches if batch.later is not None]
    return {name: torch.stack(counts)[:, n].sum() for n, name in enumerate(names)}


def message_lengths(batches: Sequence[MicroBatch]) -> dict[int, int]:
    """Sequence length of the messages between stages, by micro-batch."""
    return {micro: batch.residual_length for micro, batch in enumerate(batches)}


def forward_step(
    run: Run,
    batches: Sequence[MicroBatch],
    auxiliary: AuxiliaryLosses | None = None,
    statistics: "StepStatistics | None" = None,
    *,
    spoiled: bool = False,
) -> ForwardStep:
    """Return the forward function of a stage: its output is hidden states, or on the last stage the sum of losses.

    ``spoiled``: losses of the first micro-batch are NaN, for tests.
    """
    last_stage = len(run.layers) - 1
    loss = run.objective.step_loss(batches, statistics)
    compute = model_step(
        run, run.stages, batches, auxiliary, logit_losses=loss.logit_losses, router_replays=loss.router_replays
    )

    def forward(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        output = compute(stage, micro, hidden)
        if stage < last_stage:
            return output
        if spoiled and micro == 0:
            output = output * math.nan
        return loss.sum_losses(micro, output)

    return forward


ModelStep = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, hidden states of the previous stage) -> hidden states, or losses on the last stage."""


def model_step(
    run: Run,
    stages: Mapping[int, GPTModel],
    batches: Sequence[MicroBatch],
    auxiliary: AuxiliaryLosses | None,
    *,
    logit_losses: Mapping[int, LogitLoss] = MappingProxyType({}),
    router_replays: Mapping[int, Any] = MappingProxyType({}),
    before_output_layer: bool = False,
) -> ModelStep:
    """Return the forward function of ``stages`` whose output on the last stage are the losses of tokens ``[b, n]``.

    ``logit_losses``: loss of the logits by micro-batch, instead of cross entropy; ``router_replays``: experts of the
    tokens by micro-batch. ``before_output_layer``: its output on the last stage is the input of the output layer.
    """
    last_stage = len(run.layers) - 1

    def forward(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        batch = batches[micro]
        return stages[stage](
            batch.tokens,
            batch.position_ids,
            hidden_states=hidden,
            labels=batch.labels if stage == last_stage else None,
            sequences=batch,
            state=ForwardState(
                auxiliary_losses=None if auxiliary is None else auxiliary.of_micro_batch(micro),
                router_replay=router_replays.get(micro),
            ),
            head=HeadOptions(logit_loss=logit_losses.get(micro), is_skipped=before_output_layer),
        )

    return forward


class StepStatistics:
    """This rank's terms of one step's sums: squares and zeros if flags request them, and losses by source of a blend.

    Also the sums of the objective. The result of ``own`` is summed over all ranks together with the
    loss; ``read`` converts the sums to metrics.
    """

    def __init__(self, run: Run, shift: int = 0) -> None:
        """``shift``: distance to the data-parallel rank whose samples this rank computes."""
        monitor, self._norm = run.config.monitor, run.optimizer.norm
        self._totals = monitor.log_params_norm or monitor.log_num_zeros_in_grad
        self._layers = run.config.model.num_layers if monitor.log_norms_by_layer else None
        self._sources, self._owns_loss = sources_of(run.splits.train), run.split.owns_loss
        self._losses = torch.zeros(2, len(self._sources), dtype=torch.float64, device=run.world.device)
        copies = run.groups.size("dp") if run.attempts.by_copy else 0
        self._copies = torch.zeros(copies, dtype=torch.float64, device=run.world.device)
        self._copy = (run.groups.index("dp") + shift) % max(copies, 1)
        self._objective = run.objective
        self._terms = torch.zeros(run.objective.num_sums, dtype=torch.float64, device=run.world.device)

    def add_losses(self, losses: Tensor, batch: MicroBatch) -> None:
        """Add a micro-batch's token losses ``[b, n]``; masked losses are 0."""
        if len(self._copies) and self._owns_loss:
            self._copies[self._copy] += losses.detach().sum(dtype=torch.float64)
        if batch.source is not None and self._owns_loss:
            for total, values in zip(self._losses, (losses.detach(), batch.loss_mask), strict=True):
                total.index_add_(0, batch.source, values.sum(1, dtype=torch.float64))

    def add_terms(self, terms: Tensor) -> None:
        """Add a micro-batch's terms of the objective's sums."""
        if self._owns_loss:
            self._terms += terms

    def own(self) -> Tensor:
        """This rank's terms, float64 ``[n]``; call it after gradient reduction and before clipping."""
        terms = [self._norm.statistics()] if self._totals else []
        if self._layers is not None:
            terms.append(self._norm.squares_by_part(self._layers).flatten())
        return torch.cat([*terms, self._terms, self._losses.flatten(), self._copies])

    def copies(self, sums: Sequence[float]) -> tuple[float, ...]:
        """The sum of the losses of each copy's samples, with ``Attempts.by_copy``."""
        return tuple(sums[len(sums) - len(self._copies) :])

    def read(self, sums: Sequence[float], loss_scale: float) -> dict[str, float]:
        """Norms of gradients and weights by layer, and losses per token by source, by the name of the metric."""
        return dict(self._read(list(sums), loss_scale))

    def _read(self, sums: list[float], loss_scale: float) -> Iterator[tuple[str, float]]:
        del sums[: 2 * self._totals]
        if self._layers is not None:
            names = part_names(self._layers)
            for metric, scale in (("grad-norm by layer", loss_scale), ("params-norm by layer", 1.0)):
                for name in names:
                    yield f"{metric}/{name}", math.sqrt(sums.pop(0)) / scale
        num_sums = len(self._terms)
        yield from self._objective.metrics(sums[:num_sums]).items()
        del sums[:num_sums]
        totals: dict[str, list[float]] = {}
        for index, name in enumerate(self._sources):  # a file may occur twice in a blend
            total = totals.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + sums[index], total[1] + sums[index + len(self._sources)]
        for name, (loss, tokens) in totals.items():
            if tokens:
                yield f"lm loss by source/{name}", loss / tokens
