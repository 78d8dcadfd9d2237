"""A whole pretraining job on this rank."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Any

import torch

from megatron_core.checkpoint.formats import formats_of_settings
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import RunConfig
from megatron_core.config.cli import CommandLine, note_unread_flags, parse_command_line
from megatron_core.config.partition import describe_stages
from megatron_core.config.rules_single import unread_settings
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError, wrapped
from megatron_core.feature import descriptions, load_hook, used_features
from megatron_core.monitor.console import ConsoleSink
from megatron_core.monitor.events import Sink
from megatron_core.monitor.sinks import LenientSink, SinkContext, build_sinks, lenient_output
from megatron_core.ops import backend
from megatron_core.parallel import World, start_world, transports
from megatron_core.tokenizers.companions import template_path
from megatron_core.training.callbacks import Callback
from megatron_core.training.compatibility import (
    model_and_tokenizer,
    refuse_other_formats,
    settings_folder,
    stored_config,
    with_stored_schedule,
)
from megatron_core.training.data import DatasetsProvider
from megatron_core.training.loop import evaluate_only, train
from megatron_core.training.setup import Run, set_up
from megatron_core.transformer.layer_spec import LayerSpecs, layer_spec

LEAVE_SECONDS = 60.0
"""Time limit for completing a save in the background when the process ends with an error."""
NOTE_KINDS = "differs from Megatron-LM", "fast path off", "without effect"
"""Beginnings of the notes that the start prints first, in this order."""


def read_settings(
    prog: str,
    args: list[str] | None = None,
    *,
    stored_schedule: bool = True,
    parsed: CommandLine | None = None,
) -> CommandLine:
    """Parse the command line, or ``args``; return the configuration and the settings of ``--dry-run``.

    With ``use_checkpoint_args``, or a setting that names a folder of another program, defaults come from that folder.
    ``stored_schedule=False`` ignores ``use_checkpoint_opt_param_scheduler``, for checkpoints without a configuration;
    ``parsed``: the parsed command line.
    """
    config, dry = _with_defaults_of_folders(prog, args, parsed or parse_command_line(args, prog=prog))
    note_unread_flags(config, args)
    return with_stored_schedule(config) if stored_schedule else config, dry


def _with_defaults_of_folders(prog: str, args: list[str] | None, parsed: CommandLine) -> CommandLine:
    config, dry = parsed
    settings: dict[str, Any] = {}
    if not config.checkpoint.use_checkpoint_args:
        # Adapters come after the model, because their settings are added to those of the model.
        for form, model_folder in formats_of_settings(config):
            settings |= form.settings(model_folder)
        if not settings:
            return config, dry
        # Parsed again with these defaults: a flag overrides the folder, and the flag's value may equal a default.
        return parse_command_line(args, prog=prog, defaults=RunConfig.from_flat(RunConfig().flat() | settings))
    folder = settings_folder(config.checkpoint)
    if config.checkpoint.load is not None and folder is None and dry.dry_run:
        return config, dry  # its warnings say that the folder is absent
    if folder is None:
        refuse_other_formats(f"load={config.checkpoint.load!r}", config.checkpoint.load or "")
        raise ConfigError(f"use_checkpoint_args=True: load={config.checkpoint.load!r} holds no checkpoint")
    return parse_command_line(args, prog=prog, defaults=model_and_tokenizer(stored_config(folder)))


def pretrain(
    config: RunConfig,
    world: World,
    datasets_provider: DatasetsProvider | None = None,
    layer_specs: LayerSpecs = layer_spec,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Validate, set up and train; a spare rank waits until the others have finished.

    ``datasets_provider`` builds the data sets for ``dataloader_type=external``; ``layer_specs`` chooses the parts of
    each layer; ``callbacks`` run at fixed points of the training (``Callback``).
    """
    job = Job(datasets_provider, layer_specs, callbacks)
    hooks = {feature.name: feature.start for feature in used_features(config) if feature.start is not None}
    if len(hooks) > 1:
        check(config, world.size)  # its rules name the settings that exclude each other
        raise ConfigError(f"the features {', '.join(hooks)} each start the training; use only one of them")
    start = load_hook(*hooks.values()) if hooks else start_once
    start(config, world, job)


@dataclass(frozen=True)
class Job:
    """The arguments of ``pretrain`` that are not settings: a run is made from them, and again after a failure."""

    datasets_provider: DatasetsProvider | None = None
    layer_specs: LayerSpecs = layer_spec
    callbacks: Sequence[Callback] = ()

    def set_up(self, config: RunConfig, world: World, copy: StateReader | None = None) -> Run:
        """Set up a run; ``copy``: state to load in place of a checkpoint."""
        return set_up(config, world, self.datasets_provider, self.layer_specs, copy)

    def train(self, run: Run, callbacks: Sequence[Callback] = (), *, is_new: bool = True) -> None:
        """Train or evaluate ``run`` with further ``callbacks``; ``is_new``: it does not continue another in this
        job, so that it is described."""
        _train(run, [*self.callbacks, *callbacks], is_new=is_new)


def start_once(config: RunConfig, world: World, job: Job) -> None:
    """Validate, join the ranks, set up and train; a failure ends the job."""
    check(config, world.size)
    parallel = config.parallel
    start_world(world, backend=parallel.distributed_backend, timeout_minutes=parallel.distributed_timeout_minutes)
    if world.is_spare:
        return world.wait_for_end()
    run = job.set_up(config, world)
    try:
        job.train(run)
    finally:
        run.saver.join(LEAVE_SECONDS)


def _train(run: Run, callbacks: Sequence[Callback], *, is_new: bool = True) -> None:
    """Train or evaluate ``run``; ``is_new``: it does not continue another in this job, so that it is described."""
    config, world = run.config, run.world
    sinks: list[Sink] = []
    if config.checkpoint.save and not config.training.skip_train:
        # Before the first step: a folder that cannot be written ends the run now, not after hours at the first save.
        run.saver.open(is_new=run.state.iteration == 0)
    with lenient_output():
        if world.rank == 0:
            if is_new:
                introduce(run)
            context = SinkContext(config, config.checkpoint.run_folder, run.state.iteration, config.flat())
            short = config.monitor.log_format == "short"  # features print lines of other formats
            sinks = [*([ConsoleSink.of(config.monitor)] if short else []), *build_sinks(context)]
        sinks = [LenientSink(sink) for sink in sinks]
        try:
            (evaluate_only if config.training.skip_train else train)(run, sinks, callbacks)
        finally:
            for sink in sinks:
                sink.close()


def introduce(run: Run) -> None:
    """Print a description of the run, and write its configuration to the folder of the checkpoints."""
    counted = sum(p.numel() for stage in run.stages.values() for p in stage.parameters())
    where = f"layout {run.layout} on {run.world.size} ranks" if run.world.size > 1 else run.layout
    spare = f", and {run.world.spares} spare" if run.world.spares else ""
    print(f"{where}{spare} ({run.world.device.type}); {counted:,} parameters on rank 0")
    print(describe_stages(run.layers, run.plans.stage_to_rank))
    print(f"kernels: {kernels(run)}")
    for line in descriptions(run.config):
        print(line)
    for run_part in run.parts:
        for description in run_part.descriptions():
            print(description)
    if run.world.size > 1:
        print(f"collectives: {transports.describe_transport()}")
    for text in sorted(notes(run), key=lambda text: [not text.startswith(kind) for kind in NOTE_KINDS]):
        print(wrapped(f"note: {text}"))
    if run.state.iteration:
        print(f"resuming from iteration {run.state.iteration}, {run.state.consumed_samples} samples")
    sys.stdout.flush()
    if run.config.checkpoint.save and not run.config.training.skip_train:
        run.saver.keep_config()


def kernels(run: Run) -> str:
    """The backends of the fused operations, with the reason if the native one is unavailable."""
    dtype, device_type = getattr(torch, run.config.training.compute_dtype), run.world.device.type
    return backend.describe_backends(run.config.model.kernel_backend, device_type, dtype)


def missing_validation(run: Run) -> str | None:
    """Why ``eval_iters`` has no data to evaluate on; None if it has, or if a note of the data says so."""
    splits, config = run.splits, run.config
    if splits.of("validation") or run.evaluations or any("valid" in note for note in splits.notes):
        return None
    data = config.data
    request = f"eval_iters={config.training.eval_iters} evaluates on no validation data"
    if data.divided_sources:
        share = f"split={data.split} gives it none of the data" if data.split else "the data has none"
        return f"{request}: {share}; give --split 98,2,0, --valid-data-path or --eval-iters 0"
    return f"{request}; give --valid-data-path or --eval-iters 0"


def notes(run: Run) -> Iterator[str]:
    """Notes for the user before training starts."""
    settings, iteration = run.config.checkpoint, run.state.iteration
    if settings.save is not None and not run.config.training.skip_train and current_thread() is not main_thread():
        cause = "training does not run in the main thread (as under Ray Train), the only one with signal handlers"
        yield f"SIGTERM and Ctrl-C do not save: {cause}; a resume repeats the steps since the last save_interval"
    if run.config.training.eval_iters:
        yield from run.splits.notes
        if (reason := missing_validation(run)) is not None:
            yield reason
    if unread := unread_settings(run.config, run.world.size, run.world.device.type):
        yield f"without effect here: {unread}"
    for run_part in run.parts:
        yield from run_part.notes()
    template = run.config.data.chat_template
    if template is not None and settings.save is not None and not template_path(template).is_file():
        yield f"chat_template={template!r} is not a regular file: checkpoints do not contain a copy"
    for form, folder in formats_of_settings(run.config):
        yield from form.notes(folder, run.config)
    if settings.ckpt_format != "native" and settings.save is not None:
        adam = run.config.optimizer.optimizer == "adam" or settings.ckpt_format == "torch_dcp"
        state = "" if adam else f", without the state of --optimizer {run.config.optimizer.optimizer}"
        yield (
            f"ckpt_format={settings.ckpt_format}: checkpoints are written twice, also to "
            f"{run.saver.folder / settings.ckpt_format}{state}"
        )
    if settings.load is not None and not run.loaded:
        yield f"load={settings.load!r} has no checkpoint: this run starts from scratch"
    if settings.save_interval is not None and settings.save is None:
        yield f"save_interval={settings.save_interval} has no effect without --save FOLDER: nothing is saved"
    if iteration >= run.total_iterations and not run.config.training.skip_train:
        yield f"nothing to train: all {run.total_iterations} iterations are done"
