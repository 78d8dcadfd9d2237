"""One optimizer step: the plan runs, gradients are finished, weights move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_core.datasets.loader import Batch
from megatron_core.datasets.packing import DOCUMENT_LENGTHS
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.pipeline_parallel.executor import Executor, Listener, MessageFormat
from megatron_core.training.pipeline_trace import traced
from megatron_core.training.setup import Run
from megatron_core.training.step_size import StepSize


@dataclass(frozen=True)
class StepResult:
    """What a step reports; the same on every rank."""

    loss: float
    """Sum of token losses / number of tokens that count, over the whole global batch."""
    grad_norm: float
    learning_rate: float
    loss_scale: float
    size: StepSize
    skipped: bool
    stop: bool
    """Whether some rank wants to end the run."""


def train_step(run: Run, *, stop: bool = False) -> StepResult:
    """Take the next step of ``run`` and advance its counters; ``stop`` is this rank's wish to end afterwards."""
    size = run.step_after(run.state.consumed_samples)
    batches = load_batches(run, size)
    tokens = count_tokens(run, batches)
    scale = run.optimizer.loss_scale.scale

    run.data_parallel.zero_grad()
    losses = run_training_plan(run, batches, scale / tokens)
    run.data_parallel.finish()
    lr = run.schedule.lr(run.state.iteration - run.state.skipped_iterations + 1)
    outcome = run.optimizer.step(lr)
    run.data_parallel.gather_weights()

    run.state.iteration += 1
    run.state.consumed_samples += size.batch_size
    run.state.consumed_tokens += size.tokens
    run.state.skipped_iterations += outcome.skipped
    run.state.layout, run.state.validation_loss = run.layout, None
    loss, wish = sum_over_ranks(run, [run.counts * sum_of(losses) / scale, float(stop)])
    return StepResult(loss, outcome.grad_norm, lr, scale, size, outcome.skipped, wish > 0.0)


def load_batches(run: Run, size: StepSize) -> list[Batch]:
    """This rank's micro-batches of the next step, on its device; the step after it is read ahead."""
    batches = run.train_loader.step(size.consumed_samples, size.num_microbatches, size.sequence_length)
    if run.state.iteration + 1 < run.total_iterations:
        after = run.step_after(size.end)
        run.train_loader.prefetch(after.consumed_samples, after.num_microbatches, after.sequence_length)
    return to_device(batches, run.world.device)


def to_device(batches: list[Batch], device: torch.device) -> list[Batch]:
    """The batches on ``device``, but for what the host has to know of them."""

    def place(name: str, tensor: Tensor) -> Tensor:
        return tensor if name == DOCUMENT_LENGTHS else tensor.to(device, non_blocking=True)

    return [{name: place(name, tensor) for name, tensor in batch.items()} for batch in batches]


def count_tokens(run: Run, batches: list[Batch]) -> float:
    """Tokens that count in the whole global batch, at least 1; known before backward, so that no average is ever
    taken of averages."""
    total = torch.stack([batch["loss_mask"].sum(dtype=torch.float64) for batch in batches]).sum()
    all_reduce_(total, run.groups.group("dp-cp"))
    return max(total.item(), 1.0)


def run_training_plan(run: Run, batches: list[Batch], loss_factor: float) -> dict[int, Tensor]:
    """Forward and backward of all micro-batches; the last stage's losses times ``loss_factor``, by micro-batch."""
    forward = forward_step(run, batches, loss_factor)
    listener = Listener(on_last_backward=run.data_parallel.arm, on_last_weights=run.data_parallel.reduce_early)
    # Not the output layer's: to put its weight gradient off would keep a gradient as large as the logits.
    parameters = [p for stage in run.stages.values() for p in stage.decoder.parameters()]
    posted = run.plans.training(len(batches))
    with traced(run, listener) as listener:
        executor = Executor(
            posted.plan,
            run.links,
            message_of(run, batches),
            forward,
            parameters=parameters,
            posting=posted.posting,
            listener=listener,
        )
        return executor.run()


def message_of(run: Run, batches: list[Batch]) -> MessageFormat:
    """What travels between stages in this step, whose sequences may be of any length."""
    parts = run.groups.size("tp") if run.config.parallel.sequence_parallel else 1
    return replace(run.message, lengths={m: batch["tokens"].shape[1] // parts for m, batch in enumerate(batches)})


def forward_step(run: Run, batches: list[Batch], loss_factor: float) -> Callable[[int, int, Tensor | None], Tensor]:
    """The function that computes a stage: hidden states, or on the last one loss_factor x the sum of token losses."""
    last = len(run.layers) - 1
    # Where no position restarts, one rotary table serves all sequences, and the model makes it itself.
    rotary = run.config.model.position_embedding_type == "rope"
    own_positions = run.config.data.reset_position_ids or not rotary

    def forward(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        batch = batches[micro]
        output = run.stages[stage](
            batch["tokens"],
            batch["position_ids"] if own_positions else None,
            hidden_states=hidden,
            labels=batch["labels"] if stage == last else None,
            sample_index=batch["sample_index"],
            document_lengths=lengths_of(batch),
        )
        if stage < last:
            return output
        return (output * batch["loss_mask"]).sum() * loss_factor

    return forward


def lengths_of(batch: Batch) -> list[list[int]] | None:
    """The documents' lengths in each sequence of a micro-batch; None where they are not told apart."""
    if DOCUMENT_LENGTHS not in batch:
        return None
    return [[length for length in row if length] for row in batch[DOCUMENT_LENGTHS].tolist()]


def sum_of(losses: dict[int, Tensor]) -> float:
    """Total of the micro-batches' losses; 0 on ranks without the last stage."""
    return torch.stack(list(losses.values())).sum(dtype=torch.float64).item() if losses else 0.0


def sum_over_ranks(run: Run, values: list[float]) -> list[float]:
    """Each of ``values`` summed over all ranks of the job."""
    totals = torch.tensor(values, dtype=torch.float64, device=run.world.device)
    all_reduce_(totals, run.groups.group("tp-cp-ep-dp-pp"))
    return totals.tolist()
