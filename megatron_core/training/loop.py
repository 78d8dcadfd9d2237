"""The training loop: steps, evaluations, checkpoints, and early stops with a checkpoint."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_core.config.flops import flops_per_token
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent
from megatron_core.monitor.memory import peak_memory_bytes
from megatron_core.parallel.launch import RestartNeeded
from megatron_core.parallel.meter import METER
from megatron_core.parallel.texts import gather_texts, listed, tell_all
from megatron_core.training.bad_steps import BadSteps
from megatron_core.training.checks import RunChecks
from megatron_core.training.failures import FailureLog
from megatron_core.training.faults import Faults
from megatron_core.training.memory_report import describe_memory
from megatron_core.training.memory_snapshot import MemorySnapshots
from megatron_core.training.setup import Run
from megatron_core.training.state import TrainState
from megatron_core.training.step import StepResult, evaluate, leave_out_step, train_step
from megatron_core.training.stop import StopRequest
from megatron_core.training.watch import Watch


def train(run: Run, sinks: Sequence[Sink]) -> None:
    """Train until the last step, a signal, ``exit_interval`` or ``exit_duration_in_mins`` (``StopRequest``); save."""
    failures = FailureLog(run.config, run.world.rank)
    failures.begin()
    stop, watchdog = StopRequest(run.config.training.exit_duration_in_mins), run.world.watchdog
    snapshots = MemorySnapshots(run)
    try:
        with failures.noting():
            _train(run, sinks, stop, failures, snapshots)
        if run.config.resilience.elastic:
            _end_elastic(run, stop)
    finally:
        stop.restore()
        snapshots.restore()
        if watchdog is not None:
            watchdog.rest()


def _train(
    run: Run, sinks: Sequence[Sink], stop: StopRequest, failures: FailureLog, snapshots: MemorySnapshots
) -> None:
    # Checks, timers and, after a change of layout, an evaluation before the first step.
    checks, bad, faults = RunChecks(run), BadSteps(run), Faults(run)
    checks.start()
    watch = Watch(run)
    confirm_layout_change(run, sinks)
    first = saved_at = evaluated_at = run.state.iteration
    while run.state.iteration < run.total_iterations:
        begin_step(run, failures)
        if bad.leaves_out():
            size = leave_out_step(run)
            if run.world.rank == 0:
                print(f"note: iteration {run.state.iteration} is left out (samples up to {size.end - 1})", flush=True)
            continue
        # Take the step.
        watched = is_due(run.state.iteration + 1, run.config.training.fp8_statistics_interval)
        if run.fp8 is not None:
            run.fp8.count(wanted=watched)
        began = time.perf_counter()
        with snapshots.around_step():
            result = train_step(run, stop=stop.wanted, hooks=replace(faults.before_step(), is_bad=bad.is_bad))
        # Report it and run the checks.
        run.saver.restore_folders()
        report_step(run, sinks, result, time.perf_counter() - began, watch.after_step(result))
        if watched:
            report_fp8(run)
        bad.after_step(result)
        failures.passed(run.state.iteration)
        checks.after_step(result)
        iteration = run.state.iteration
        if iteration == first + 2 and run.world.rank == 0:
            print(describe_memory(run, after_step=iteration), flush=True)
        # Evaluate, save or stop if due.
        if is_due(iteration, run.config.training.eval_interval):
            report_validation(run, sinks, "validation")
            evaluated_at = iteration
        if save_when_due(run, checks, bad, faults):
            saved_at = iteration
        if result.stop or is_due(iteration, run.config.training.exit_interval):
            break
    # Final evaluation, checkpoint and reports.
    if run.state.iteration == run.total_iterations:
        if evaluated_at < run.state.iteration:
            report_validation(run, sinks, "validation")
        report_validation(run, sinks, "test")
    if run.config.checkpoint.save and saved_at != run.state.iteration and not bad.streak:
        with faults.around_save():
            save(run, checks)
    run.saver.finish()
    faults.finish()
    if run.state.iteration < run.total_iterations:
        report_early_end(run, is_saved=not bad.streak)
    elif run.world.rank == 0 and bad.streak and run.config.checkpoint.save:
        print(f"not saved: the last steps ({bad.streak}) were bad; the checkpoint before them stays", flush=True)
    watch.close()


def _end_elastic(run: Run, stop: StopRequest) -> None:
    """Release the spare ranks, unless the launchers sent SIGTERM to all ranks: they then end the spare ranks, too.

    Errors: ``RestartNeeded`` on all ranks if only some ranks received SIGTERM: the run continues without them.
    """
    told = tell_all(stop.reason, run.world.device)
    left = [rank for rank, reason in enumerate(told) if reason == "SIGTERM"]
    if run.state.iteration == run.total_iterations or {*told} - {""} != {"SIGTERM"}:
        run.world.release_spares()
    elif len(left) < len(told):
        raise RestartNeeded(f"SIGTERM came to rank {listed(left)} alone; a restart goes on with those left")


def begin_step(run: Run, failures: FailureLog) -> None:
    """Tell the failure log and the watchdog which step starts."""
    failures.iteration = run.state.iteration + 1
    if run.world.watchdog is not None:
        run.world.watchdog.beat(run.state.iteration + 1)


def evaluate_splits(run: Run, sinks: Sequence[Sink]) -> None:
    """Evaluate on the validation and the test data, if present."""
    for split in ("validation", "test"):
        report_validation(run, sinks, split)


def report_early_end(run: Run, *, is_saved: bool = True) -> None:
    """Print that the run ends before the last step, and whether it is saved."""
    if run.world.rank == 0:
        folder = run.config.checkpoint.save
        kept = f"saved in {folder}" if folder else "not saved: give --save FOLDER to keep it"
        kept = kept if is_saved else "not saved: the last steps were bad; the checkpoint before them stays"
        print(f"ends early, after iteration {run.state.iteration}; {kept}", flush=True)


def is_due(iteration: int, interval: int | None) -> bool:
    """Whether an action with period ``interval`` is due at ``iteration``; never with None."""
    return interval is not None and iteration % interval == 0


def save_when_due(run: Run, checks: RunChecks, bad: BadSteps, faults: Faults) -> bool:
    """Write the checkpoint that is due after a good step; return whether a persistent one was written."""
    settings, iteration = run.config.checkpoint, run.state.iteration
    if bad.streak:
        return False
    if is_due(iteration, settings.save_interval):
        with faults.around_save():
            return bool(save(run, checks, run.saver.try_to_save))
    if is_due(iteration, settings.non_persistent_save_interval):
        save(run, checks, partial(run.saver.try_to_save, temporary=True))
    return False


def save(run: Run, checks: RunChecks, write: Callable[[TrainState], object] | None = None) -> object:
    """Check the replicas, then write a checkpoint; return the result of ``write`` (default: the saver's ``save``)."""
    checks.compare()
    with METER.phase("checkpoint", whole=True):
        return (write or run.saver.save)(run.state)


def report_step(
    run: Run, sinks: Sequence[Sink], result: StepResult, seconds: float, watched: Mapping[str, Any] | None = None
) -> None:
    """Report a step to the sinks; ``watched`` is the result of ``Watch.after_step``."""
    tokens = result.size.tokens
    flops = tokens * flops_per_token(run.config.model, result.size.sequence_length, run.vocab_size)
    event = StepEvent(
        iteration=run.state.iteration,
        total_iterations=run.total_iterations,
        consumed_samples=run.state.consumed_samples,
        consumed_tokens=run.state.consumed_tokens,
        loss=result.loss,
        learning_rate=result.learning_rate,
        global_batch_size=result.size.batch_size,
        loss_scale=result.loss_scale,
        grad_norm=result.grad_norm,
        elapsed_ms=1000.0 * seconds,
        tokens_per_second=tokens / seconds,
        model_flops_per_second=flops / seconds / run.world.size,
        memory_bytes=peak_memory_bytes(),
        auxiliary_losses=result.auxiliary_losses,
        expert_load=result.expert_load,
        breakdown=result.breakdown,
        skipped=result.skipped,
        params_norm=math.sqrt(result.statistics[0]) if run.config.monitor.log_params_norm else None,
        num_zeros_in_grad=round(result.statistics[1]) if run.config.monitor.log_num_zeros_in_grad else None,
        layout=run.layout,
        **(watched or {}),
    )
    for sink in sinks:
        sink.on_step(event)


def report_fp8(run: Run) -> None:
    """Print the shares of elements that FP8 clamped or rounded to 0 in this step, by layer, over all ranks."""
    assert run.fp8 is not None, "fp8_statistics_interval needs fp8_format"
    own = [f"  {loss.layer} {loss.role}: {loss.saturated:.4%}, {loss.underflown:.4%}" for loss in run.fp8.losses()]
    stages = gather_texts("\n".join(own), run.groups.group("pp"), run.world.device)
    if run.world.rank == 0:
        print(f"fp8 at iteration {run.state.iteration}: elements clamped, and elements that became 0")
        print("\n".join(text for text in stages if text), flush=True)


def report_validation(run: Run, sinks: Sequence[Sink], split: str) -> None:
    """Evaluate on a split, if it has data, and report the loss to the sinks."""
    dataset = run.splits.valid if split == "validation" else run.splits.test
    if dataset is None or run.config.training.eval_iters == 0:
        return
    with METER.phase("evaluation", whole=True):
        loss = evaluate(run, dataset, run.config.training.eval_iters)
    if split == "validation":
        run.state.validation_loss = loss
    event = ValidationEvent(
        iteration=run.state.iteration,
        loss=loss,
        consumed_samples=run.state.consumed_samples,
        consumed_tokens=run.state.consumed_tokens,
        split=split,
    )
    for sink in sinks:
        sink.on_validation(event)


def confirm_layout_change(run: Run, sinks: Sequence[Sink]) -> None:
    """If a checkpoint of another layout was loaded, evaluate it in this layout too and print both losses."""
    before, layout = run.state.validation_loss, run.state.layout
    if before is None or layout == run.layout or run.splits.valid is None or run.config.training.eval_iters == 0:
        return
    report_validation(run, sinks, "validation")
    if run.world.rank == 0:
        print(
            f"layout changed from {layout} to {run.layout}: the validation loss was {before:.6f} there and is "
            f"{run.state.validation_loss:.6f} here",
            flush=True,
        )
