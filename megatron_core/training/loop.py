"""The training loop: steps, evaluations and checkpoints; everything else is a callback."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from megatron_core.monitor.events import Sink, ValidationEvent
from megatron_core.parallel.meter import METER
from megatron_core.training.built_in_callbacks import Heartbeat, Reports, StopRequests
from megatron_core.training.callbacks import Callback, Callbacks, feature_callbacks, is_due
from megatron_core.training.setup import Run
from megatron_core.training.step import evaluate, leave_out_listed, train_step


def built_in_callbacks(run: Run, sinks: Sequence[Sink]) -> list[Callback]:
    """The callbacks of every training run, in the order of their priorities."""
    return [Heartbeat(run), StopRequests(run), Reports(run, sinks)]


def train(run: Run, sinks: Sequence[Sink], callbacks: Sequence[Callback] = ()) -> None:
    """Train until the last step, ``exit_interval`` or ``run.stop_reason`` of any rank; evaluate and save when due.

    ``callbacks`` are called in addition to the built-in callbacks.
    """
    config = run.config
    hooks = Callbacks(run, [*built_in_callbacks(run, sinks), *feature_callbacks(run), *callbacks])
    with hooks.running():
        confirm_layout_change(run, hooks)
        saved_at = evaluated_at = run.state.iteration
        # Steps; only a step with the same result on all ranks reports a stop, so that all ranks stop together.
        while run.state.iteration < run.total_iterations:
            if leave_out_listed(run):
                continue
            hooks.call("before_step")
            result = train_step(run, stop=bool(run.stop_reason), hooks=hooks.step_hooks)
            hooks.call("after_step", result)
            # Before the save, so that the checkpoint has the validation loss of its weights; another layout compares
            # its own.
            may_evaluate = run.state.iteration >= (config.training.start_eval_at_iter or 0)
            if may_evaluate and is_due(run.state.iteration, config.training.eval_interval):
                evaluate_split(run, hooks, "validation")
                evaluated_at = run.state.iteration
            # In each step, because recovery copies the state between saves.
            hooks.store_values()
            if save_when_due(run, hooks):
                saved_at = run.state.iteration
            if result.stop or is_due(run.state.iteration, config.training.exit_interval):
                break
        # Final evaluation and checkpoint.
        if run.state.iteration == run.total_iterations:
            if evaluated_at < run.state.iteration:
                evaluate_split(run, hooks, "validation")
            evaluate_split(run, hooks, "test")
            hooks.store_values()
        if config.checkpoint.save and saved_at != run.state.iteration and not run.bad_steps:
            save(run, hooks)
        # Before the end is reported, because a background save may still fail.
        run.saver.finish()
        report_end(run)


def evaluate_only(run: Run, sinks: Sequence[Sink], callbacks: Sequence[Callback] = ()) -> None:
    """Evaluate on the validation and the test data, if present, without training (``skip_train``)."""
    reports = Reports(run, sinks)
    hooks = Callbacks(run, [reports, *feature_callbacks(run), *callbacks])
    with hooks.running():
        for split in ("validation", "test"):
            evaluate_split(run, hooks, split)


def confirm_layout_change(run: Run, hooks: Callbacks) -> None:
    """If a checkpoint of another layout was loaded, evaluate it in this layout too and print both losses."""
    before, layout = run.state.validation_loss, run.state.layout
    if before is None or layout == run.layout or not run.splits.of("validation") or run.config.training.eval_iters == 0:
        return
    # The same loss in the new layout shows that the weights were divided as they should be.
    evaluate_split(run, hooks, "validation")
    if run.world.rank == 0:
        print(
            f"layout changed from {layout} to {run.layout}: the validation loss was {before:.6f} there and is "
            f"{run.state.validation_loss:.6f} here",
            flush=True,
        )


def evaluate_split(run: Run, hooks: Callbacks, split: str) -> None:
    """Evaluate on each set of ``validation`` or ``test`` data, with ``validation`` also as features do
    (``Evaluation``); call ``after_evaluation`` for each result. The run's validation loss is the mean over the sets."""
    sets = run.splits.of(split)
    evaluations = run.evaluations if split == "validation" else ()
    if run.config.training.eval_iters == 0 or not (sets or evaluations):
        return
    event = partial(
        ValidationEvent,
        iteration=run.state.iteration,
        consumed_samples=run.state.consumed_samples,
        consumed_tokens=run.state.consumed_tokens,
    )
    events: list[ValidationEvent] = []
    losses: list[float] = []
    # With the weights of the model, or those that a feature evaluates in their place; then with those of features.
    weights: dict[str, Callable[[], AbstractContextManager[None]]] = {"": nullcontext}
    for run_part in run.parts:
        weights |= run_part.evaluated_weights()
    with METER.phase("evaluation", inclusive=True):
        run.optimizer.synchronize()
        for suffix, context in weights.items():
            with context():
                means = [evaluate(run, dataset, run.config.training.eval_iters) for dataset in sets.values()]
                events.extend(event(loss=loss, split=name + suffix) for name, loss in zip(sets, means, strict=True))
                for evaluation in evaluations:
                    events.extend(event(split=name + suffix, **values) for name, values in evaluation.results(run))
            losses = losses or means
    if split == "validation" and losses:
        run.state.validation_loss = sum(losses) / len(losses)
    for result in events:
        hooks.call("after_evaluation", result)


def save_when_due(run: Run, hooks: Callbacks) -> bool:
    """Write the checkpoint that is due after a good step; return whether a persistent one was written.

    If writing fails, training continues with the earlier checkpoints.
    """
    settings, iteration = run.config.checkpoint, run.state.iteration
    if run.bad_steps:
        return False
    if is_due(iteration, settings.save_interval):
        return save(run, hooks, may_fail=True)
    if is_due(iteration, settings.non_persistent_save_interval):
        save(run, hooks, may_fail=True, temporary=True)
    return False


def save(run: Run, hooks: Callbacks, *, may_fail: bool = False, temporary: bool = False) -> bool:
    """Write a checkpoint between ``before_save`` and ``after_save``; return whether it was written.

    Errors: ``CheckpointError`` on all ranks, unless it ``may_fail``.
    """
    run.optimizer.synchronize()
    hooks.call("before_save", temporary)
    with METER.phase("checkpoint", inclusive=True):
        if may_fail:
            saved = run.saver.try_to_save(run.state, temporary=temporary)
        else:
            run.saver.save(run.state, temporary=temporary)
            saved = True
    hooks.call("after_save", temporary, saved)
    return saved


def report_end(run: Run) -> None:
    """Print whether the run ends before the last step, and whether its last step is saved."""
    if run.world.rank != 0:
        return
    folder, earlier = run.config.checkpoint.save, "the last checkpoint before them is intact"
    if run.state.iteration < run.total_iterations:
        saved = f"saved in {folder}" if folder else "not saved: give --save FOLDER to keep it"
        saved = f"not saved: the last steps were bad; {earlier}" if run.bad_steps else saved
        reason = f" ({run.stop_reason})" if run.stop_reason else ""
        print(f"ends early, after iteration {run.state.iteration}{reason}; {saved}", flush=True)
    elif run.bad_steps and folder:
        print(f"not saved: the last steps ({run.bad_steps}) were bad; {earlier}", flush=True)
