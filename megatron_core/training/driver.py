"""One optimizer step of any model: forward and backward under a plan, complete gradients, norm, update.

Training, evaluation and the parity command all run through here; what differs between them is the forward function and
the hooks. A step waits for the device once: what it reports and the norm that the update needs are fetched together.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_core.data_parallel import DataParallel
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.meter import METER
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.pipeline_parallel.executor import Executor, ForwardStep, Listener, MessageFormat
from megatron_core.pipeline_parallel.p2p import Links
from megatron_core.schedules.actions import Plan
from megatron_core.tensor_parallel.amax_history import AmaxHistories
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses


@dataclass(kw_only=True)
class Trainable:
    """This rank's part of a model with all that a step of it needs."""

    groups: ParallelGroups
    split: SequenceSplit
    links: Links
    message: MessageFormat
    """What travels between stages, but for the lengths of micro-batches that differ."""
    data_parallel: DataParallel
    optimizer: Optimizer
    deferrable: Sequence[nn.Parameter]
    """Parameters whose weight gradients a split backward may compute later."""
    overlap_p2p: bool = True
    """Whether messages between stages travel while the ranks compute."""
    fp8: AmaxHistories | None = None
    """The scales of layers in FP8 from step to step."""


@dataclass(frozen=True)
class StepHooks:
    """What else happens in a step."""

    around_plan: Callable[[Listener], AbstractContextManager[Listener]] = nullcontext
    """Entered for forward and backward, with the executor's listener; its value is the listener to use."""
    statistics: Callable[[], Tensor] | None = None
    """What this rank adds to further sums over all ranks, asked for when gradients are complete and not yet clipped."""
    before_update: Callable[[], None] = lambda: None
    """Called when gradients are complete and summed over all ranks, and not yet clipped."""
    is_bad: Callable[[float, float], bool] = lambda loss, norm: False
    """Whether a step with this loss and gradient norm must be skipped; it must be the same on all ranks."""


NO_HOOKS = StepHooks()


@dataclass(frozen=True)
class StepOutcome:
    """What a step did; the same on every rank."""

    loss: float
    """Sum of the losses of all micro-batches / number of terms."""
    grad_norm: float
    """Global gradient norm before clipping, without the loss scale."""
    skipped: bool
    """Whether the weights stayed because a gradient was not finite."""
    stop: bool
    """Whether some rank asked to stop."""
    auxiliary_losses: Mapping[str, float]
    """The means of the losses that layers added, over the global batch, without their coefficients."""
    statistics: Sequence[float]
    """The sums of ``StepHooks.statistics``."""
    expert_load: Mapping[int, Sequence[int]]
    """By layer with experts: how often each of them was chosen in the global batch, and, last, how many choices were
    dropped."""


def take_step(
    model: Trainable,
    plan: Plan,
    forward: ForwardStep,
    terms: Tensor,
    lr: float,
    *,
    lengths: Mapping[int, int] | None = None,
    auxiliary: AuxiliaryLosses | None = None,
    decoupled_lr: float | None = None,
    weight_decay: float | None = None,
    stop: bool = False,
    hooks: StepHooks = NO_HOOKS,
) -> StepOutcome:
    """Take one step on the sum of all losses divided by the number of their terms, in the whole global batch.

    ``forward(stage, micro, hidden)`` gives the sum of a micro-batch's losses on the last stage; ``terms`` is a float64
    scalar, how many terms the losses of this rank's micro-batches have. ``lengths`` are those of messages by
    micro-batch; ``decoupled_lr`` is that of embeddings and output layer, ``weight_decay`` this step's if it changes;
    ``auxiliary`` collects the losses that layers add, and has the same names on every rank; ``stop`` is this rank's
    wish, which all ranks learn.
    """
    data, optimizer = model.data_parallel, model.optimizer
    scale = optimizer.loss_scale.scale
    METER.switch("gradients")
    data.zero_grad()
    losses = forward_backward(model, plan, forward, terms, lengths=lengths, auxiliary=auxiliary, hooks=hooks)
    data.finish_grad_sync()
    hooks.before_update()
    METER.switch("optimizer")
    auxiliary = auxiliary or AuxiliaryLosses((), 0)
    added = auxiliary.totals(terms.device, owns_loss=model.split.owns_loss)
    load = auxiliary.expert_load(terms.device)
    own = torch.stack([sum_of(model, losses) / scale, torch.full_like(terms, float(stop))])
    further = own.new_zeros(0) if hooks.statistics is None else hooks.statistics()
    report = torch.cat([own, added, further, load.flatten()])
    all_reduce_(report, model.groups.group(WORLD))
    found = torch.cat([optimizer.gradient_norm().view(1), report]).tolist()  # the step's one wait
    norm, loss, wishes, *means = found[: 3 + len(added)]
    at = 3 + len(added) + len(further)
    skipped = optimizer.step(lr, norm, decoupled_lr, weight_decay, skip=hooks.is_bad(loss, norm))
    if model.fp8 is not None:
        model.fp8.update()
    data.start_param_sync()
    METER.switch("other")
    return StepOutcome(
        loss,
        norm,
        skipped,
        wishes > 0.0,
        dict(zip(auxiliary.names, means, strict=True)),
        found[3 + len(added) : at],
        dict(zip(auxiliary.expert_layers, _in_rows(found[at:], load.shape[1]), strict=True)),
    )


def _in_rows(numbers: list[float], length: int) -> list[list[int]]:
    """Rows of so many whole numbers."""
    return [[round(number) for number in numbers[at : at + length]] for at in range(0, len(numbers), length)]


def forward_backward(
    model: Trainable,
    plan: Plan,
    forward: ForwardStep,
    terms: Tensor,
    *,
    lengths: Mapping[int, int] | None = None,
    auxiliary: AuxiliaryLosses | None = None,
    hooks: StepHooks = NO_HOOKS,
) -> list[Tensor]:
    """Forward and backward of all micro-batches; losses times the loss scale / number of terms in the global batch.

    The number of terms is known before backward, so that no average is ever taken of averages; it stays on the device.
    """
    counts = {} if auxiliary is None else auxiliary.counts
    totals = torch.stack([terms, *counts.values()])
    all_reduce_(totals, model.groups.group("dp-cp"))
    total, *others = totals.clamp_min_(1.0)
    scale = model.optimizer.loss_scale.scale
    factor = scale / total
    if auxiliary is not None:
        auxiliary.tokens, auxiliary.loss_scale = total, scale
        auxiliary.counts = dict(zip(counts, others, strict=True))
    last = plan.num_stages - 1

    def scaled(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        output = forward(stage, micro, hidden)
        return output * factor.to(output.dtype) if stage == last else output

    data = model.data_parallel
    listener = Listener(
        on_last_backward=data.enable_grad_sync,
        on_last_weights=data.start_grad_sync,
        on_begin=data.begin_action,
        on_end=data.end_action,
    )
    with hooks.around_plan(listener) as listener:
        return run_plan(model, plan, scaled, lengths=lengths, listener=listener)


def run_plan(
    model: Trainable,
    plan: Plan,
    forward: ForwardStep,
    *,
    lengths: Mapping[int, int] | None = None,
    listener: Listener | None = None,
) -> list[Tensor]:
    """Run a plan, whether it has backwards or not; what ``forward`` gives on the last stage, if it is on this rank."""
    message = replace(model.message, lengths=lengths or {})
    executor = Executor(
        plan,
        model.links,
        message,
        forward,
        parameters=model.deferrable,
        overlap=model.overlap_p2p,
        listener=listener or Listener(),
    )
    return list(executor.run().values())


def sum_of(model: Trainable, losses: Sequence[Tensor]) -> Tensor:
    """Sum of ``losses`` as a float64 scalar; 0 on ranks without the last stage, or whose losses are copies."""
    if not losses or not model.split.owns_loss:
        return torch.zeros((), dtype=torch.float64, device=model.data_parallel.device)
    return torch.stack(list(losses)).sum(dtype=torch.float64)
