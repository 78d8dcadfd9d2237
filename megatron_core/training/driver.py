"""One optimizer step of any model: forward and backward by a plan, reduction of gradients, norm, update.

``take_step`` is the whole step; training and the parity command call it with different forward functions and hooks. Its
phases are separate functions: evaluation runs plans without backward, and a program written for Megatron-LM calls the
phases one by one. A step synchronizes with the device once: the reported values and the norm for the update are copied
to the host together.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from megatron_core.data_parallel import DataParallel
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.meter import METER
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.pipeline_parallel.executor import Executor, ForwardStep, Listener
from megatron_core.pipeline_parallel.messages import Message, Messages
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.schedules.actions import Plan
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses


@dataclass(kw_only=True)
class PipelineRank:
    """The objects needed to run a plan on this rank."""

    p2p: PipelineP2P
    message: Messages
    """Format of the messages between stages; lengths that vary by micro-batch are passed separately."""
    deferrable: Sequence[nn.Parameter] = ()
    """Parameters whose weight gradients may be deferred by a split backward."""
    overlap_p2p: bool = True
    """Whether messages between stages overlap with computation."""


@dataclass(kw_only=True)
class Trainable(PipelineRank):
    """This rank's part of a model with all objects needed for a training step."""

    groups: ParallelGroups
    split: SequenceSplit
    data_parallel: DataParallel
    optimizer: Optimizer
    after_gradients: Callable[[], object] = lambda: None
    """Called when the gradients of a step are summed over all ranks: layers keep state across steps."""


@dataclass(frozen=True)
class StepHooks:
    """Functions that a step calls at fixed points."""

    around_plan: Callable[[Listener], AbstractContextManager[Listener]] = nullcontext
    """Context manager around forward and backward; it receives the executor's listener and yields the one to use."""
    statistics: Callable[[], Tensor] | None = None
    """Returns this rank's terms of additional sums over all ranks; called after gradient reduction, before clipping."""
    before_update: Callable[[], object] = lambda: None
    """Called after gradients are summed over all ranks and before they are clipped."""
    is_bad: Callable[[float, float], bool] = lambda loss, norm: False
    """Whether to skip a step with this loss and gradient norm; the result must be equal on all ranks."""


NO_HOOKS = StepHooks()


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step; equal on all ranks of an outer group, and on all ranks if the groups have reported."""

    loss: float
    """Sum of the losses of all micro-batches / number of terms."""
    grad_norm: float
    """Global gradient norm before clipping, without the loss scale."""
    skipped: bool
    """Whether the update was skipped: a gradient was not finite, or ``StepHooks.is_bad`` was true."""
    stop: bool
    """Whether any rank requested a stop."""
    auxiliary_losses: Mapping[str, float]
    """Means of the layers' auxiliary losses over the global batch, without their coefficients."""
    statistics: Sequence[float]
    """The sums of ``StepHooks.statistics``."""
    expert_load: Mapping[int, Sequence[int]]
    """For each layer with experts: how often each expert was chosen in the global batch, followed by the number of
    dropped choices."""
    groups: Sequence[tuple[float, float]]
    """If several outer groups have reported: loss and gradient norm of each; ``loss`` and ``grad_norm`` are their
    means."""


@dataclass(frozen=True)
class StepWork:
    """The computation of a step on this rank, without the update."""

    plan: Plan
    forward: ForwardStep
    """``forward(stage, micro, hidden)`` returns the sum of a micro-batch's losses on the last stage."""
    terms: Tensor
    """Number of loss terms in this rank's micro-batches, a float64 scalar."""
    lengths: Mapping[int, int] | None = None
    """Message length by micro-batch, if it varies."""
    auxiliary: AuxiliaryLosses | None = None
    """Collects the layers' auxiliary losses, with the same names on all ranks."""


@dataclass(frozen=True)
class StepRates:
    """The rates of an update."""

    lr: float
    decoupled_lr: float | None = None
    """Learning rate of embeddings and output layer, if it is separate."""
    weight_decay: float | None = None
    """The value for this step, if it varies."""


def take_step(
    model: Trainable,
    work: StepWork,
    rates: StepRates,
    *,
    stop: bool = False,
    alone: bool = False,
    hooks: StepHooks = NO_HOOKS,
) -> StepOutcome:
    """Take one step on the loss: (sum of all losses) / (number of their terms) in the global batch.

    ``stop``: whether this rank requests a stop; the outcome reports whether any rank did. ``alone``: this rank's outer
    group does not exchange reports in this step; it skips the update by itself, and does not stop.
    """
    # Forward and backward of all micro-batches, and the sums of gradients over the ranks.
    data, optimizer = model.data_parallel, model.optimizer
    METER.switch("gradients")
    data.zero_grad()
    losses, divisor = forward_backward(model, work, hooks)
    finish_gradients(data, model.after_gradients)
    hooks.before_update()
    METER.switch("optimizer")
    # Sum all reported values over all ranks, and copy them to the host with the gradient norm: every other copy would
    # wait for the device once more.
    auxiliary = work.auxiliary or AuxiliaryLosses((), 0)
    device = work.terms.device
    load = auxiliary.expert_load(device)
    values = {
        "loss": sum_of(model, losses).view(1),
        "stop": work.terms.new_full((1,), float(stop)),
        "auxiliary": auxiliary.totals(device, owns_loss=model.split.owns_loss),
        "statistics": work.terms.new_zeros(0) if hooks.statistics is None else hooks.statistics(),
        "load": load.flatten(),
    }
    # In float64: float32 counts tokens exactly only up to 2^24.
    report = torch.cat(list(values.values()))
    all_reduce_(report, model.groups.group(WORLD))
    rows = read_reports(torch.cat([report, divisor.view(1)]), model, alone=alone)
    lengths = {"norm": 1, **{name: len(value) for name, value in values.items()}, "divisor": 1}
    by_group = [_by_name(row, lengths) for row in rows]
    totals = _by_name([sum(column) for column in zip(*rows, strict=True)], lengths)
    groups = [(group["loss"][0] / group["divisor"][0], group["norm"][0]) for group in by_group]
    loss, norm = (_mean(column) for column in zip(*groups, strict=True))
    means = [auxiliary.means(group["auxiliary"]) for group in by_group]
    # Update the weights, unless the step is skipped, which all groups that have reported decide together.
    skip = hooks.is_bad(loss, norm) or not math.isfinite(norm)
    # Each group clips by the norm of its own gradients. There is one row if this group does not hear the others.
    own_norm = groups[model.groups.outer.rank() % len(groups)][1]
    skipped = update_weights(optimizer, [data], own_norm, rates.lr, rates.decoupled_lr, rates.weight_decay, skip=skip)
    METER.switch("other")
    return StepOutcome(
        loss=loss,
        grad_norm=norm,
        skipped=skipped,
        stop=totals["stop"][0] > 0.0 and not alone,
        auxiliary_losses={name: _mean([group[name] for group in means]) for name in means[0]},
        statistics=[value / len(groups) for value in totals["statistics"]],
        expert_load=dict(zip(auxiliary.counting_layers[0], _in_rows(totals["load"], load.shape[1]), strict=True)),
        groups=groups if len(groups) > 1 else (),
    )


def forward_backward(model: Trainable, work: StepWork, hooks: StepHooks = NO_HOOKS) -> tuple[list[Tensor], Tensor]:
    """Run forward and backward of all micro-batches; return sums of losses, and the divisor of their sum over ranks.

    The divisor is a float64 scalar. The mean over the terms of the global batch is minimised. The
    number of terms is summed before backward, so that averages are never averaged; it stays on the device.
    """
    # Global number of loss terms, and the factor of the losses.
    auxiliary = work.auxiliary
    counts = {} if auxiliary is None else auxiliary.counts
    # Only ranks with other tokens: tensor-parallel ranks and pipeline stages would count the same tokens again.
    totals = torch.stack([work.terms, *counts.values()])
    all_reduce_(totals, model.groups.group("dp-cp"))
    # A batch without counted tokens has the loss 0, not NaN.
    total, *counts_of_names = totals.clamp_min_(1.0)
    scale = model.optimizer.loss_scale.scale
    factor = scale / total
    if auxiliary is not None:
        auxiliary.counts = dict(zip(counts, counts_of_names, strict=True))
        auxiliary.tokens, auxiliary.loss_scale = auxiliary.counts["tokens"], scale
    last_stage, arithmetic = work.plan.num_stages - 1, model.data_parallel.settings.arithmetic

    def scaled(stage: int, micro: int, hidden: Message | None) -> Message:
        output = work.forward(stage, micro, hidden)
        if stage < last_stage or not isinstance(output, Tensor):
            return output
        return arithmetic.scale_loss(output, factor)

    # Run the plan; the listener starts the reduction of gradients when they are complete.
    data = model.data_parallel
    listener = Listener(
        on_last_backward=data.enable_grad_sync,
        on_last_weights=data.start_grad_sync,
        on_begin=data.begin_action,
        on_end=data.end_action,
    )
    with hooks.around_plan(listener) as listener:
        losses = run_plan(model, work.plan, scaled, lengths=work.lengths, listener=listener)
    return losses, arithmetic.divisor(total, scale)


def run_plan(
    pipeline: PipelineRank,
    plan: Plan,
    forward: ForwardStep,
    *,
    lengths: Mapping[int, int] | None = None,
    listener: Listener | None = None,
) -> list[Tensor]:
    """Run a plan with or without backward; return the outputs of the last stage if it is on this rank, else []."""
    executor = Executor(
        plan,
        pipeline.p2p,
        pipeline.message.with_lengths(lengths or {}),
        forward,
        parameters=pipeline.deferrable,
        overlap=pipeline.overlap_p2p,
        listener=listener or Listener(),
    )
    return list(executor.run().values())


def finish_gradients(data: DataParallel, after: Callable[[], object]) -> None:
    """Complete the gradients and sum them over the data-parallel ranks; then call ``after``."""
    data.finish_grad_sync()
    after()


def read_norm_and(report: Tensor, optimizer: Optimizer) -> list[float]:
    """Return the gradient norm and the values of ``report``, in the only transfer to the host of a step."""
    return read_on_host(torch.cat([optimizer.gradient_norm().view(1), report]))


def read_on_host(values: Tensor) -> list[float]:
    """Copy ``values`` to the host, in the only wait of a step for the device, at which the meter's interval ends."""
    METER.mark()
    numbers: list[float] = values.tolist()
    METER.settle()
    return numbers


def read_reports(report: Tensor, model: Trainable, *, alone: bool = False) -> list[list[float]]:
    """``read_norm_and`` of each outer group, by group; ``alone``: of this rank's group only."""
    group = model.groups.outer_reports
    if alone or group.size() == 1:
        return [read_norm_and(report, model.optimizer)]
    local_row = torch.cat([model.optimizer.gradient_norm().view(1), report])
    rows = local_row.new_empty(group.size() * local_row.numel())
    all_gather_flat_(rows, local_row, group)
    numbers = read_on_host(rows)
    return [numbers[start : start + local_row.numel()] for start in range(0, len(numbers), local_row.numel())]


def update_weights(
    optimizer: Optimizer,
    wrappers: Iterable[DataParallel],
    grad_norm: float,
    lr: float,
    decoupled_lr: float | None = None,
    weight_decay: float | None = None,
    *,
    skip: bool = False,
) -> bool:
    """Clip the gradients of ``wrappers``, update the weights, and start to gather them; return whether it was skipped.

    The arguments are those of ``Optimizer.step``.
    """
    skipped = optimizer.step(lr, grad_norm, decoupled_lr, weight_decay, skip=skip)
    gather_weights(wrappers)
    return skipped


def gather_weights(wrappers: Iterable[DataParallel]) -> None:
    """Start to gather the weights of shards that have changed, also outside of an update."""
    for data in wrappers:
        data.start_param_sync()


def sum_of(model: Trainable, losses: Sequence[Tensor]) -> Tensor:
    """Sum of ``losses`` as a float64 scalar; 0 on ranks without the last stage or with copies of the losses."""
    if not losses or not model.split.owns_loss:
        return torch.zeros((), dtype=torch.float64, device=model.data_parallel.device)
    return torch.stack(list(losses)).sum(dtype=torch.float64)


def _by_name(row: Sequence[float], lengths: Mapping[str, int]) -> dict[str, list[float]]:
    """Split ``row`` into parts with these names and lengths."""
    remaining = iter(row)
    return {name: list(islice(remaining, length)) for name, length in lengths.items()}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _in_rows(numbers: list[float], length: int) -> list[list[int]]:
    """Round ``numbers`` to integers and split them into rows of ``length``."""
    return [[round(number) for number in numbers[start : start + length]] for start in range(0, len(numbers), length)]
