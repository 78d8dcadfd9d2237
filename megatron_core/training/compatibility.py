"""Comparison of the settings stored in a checkpoint with the settings of a run."""

from collections.abc import Mapping
from dataclasses import fields, replace
from math import isclose
from pathlib import Path
from typing import Any

import torch

from megatron_core.checkpoint import find_newest, open_newest
from megatron_core.checkpoint.folder import complete_iterations
from megatron_core.checkpoint.formats import CheckpointFormat, formats_in
from megatron_core.checkpoint.manifest import MANIFEST, Manifest
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from megatron_core.config.rules_single import has_effect
from megatron_core.config.run import field_types, section_types, settings
from megatron_core.config.setting import Resume, names_by_resume
from megatron_core.config.values import convert
from megatron_core.datasets.sources import is_record
from megatron_core.errors import CheckpointError
from megatron_core.feature import features
from megatron_core.locations import in_storage, local_copy, location
from megatron_core.parallel.texts import listed
from megatron_core.tokenizers.companions import TEMPLATE_FILE
from megatron_core.training.parts import missing_in, weights_saved_alone

CPU = torch.device("cpu")
KINDS = field_types()
"""The settings and their types."""
COUNTERS = (
    *("iteration", "consumed_samples", "consumed_tokens", "skipped_iterations", "skipped_samples"),
    *("optimizer_steps", "vocab_size", "rollbacks"),
)
"""Integers in the state of a checkpoint."""
TOKENS = names_by_resume(DataConfig, Resume.TOKENS)
"""Data settings that ``--use-checkpoint-args`` takes from the checkpoint."""
SCHEDULE = names_by_resume(OptimizerConfig, Resume.SCHEDULE)
"""Settings that define the schedules of learning rate and weight decay."""


def model_settings() -> tuple[str, ...]:
    """Model settings that ``--use-checkpoint-args`` takes from the checkpoint."""
    return names_by_resume(ModelConfig, *(set(Resume) - {Resume.FREE}))


def check_same_model(stored: Mapping[str, Any], config: RunConfig, *, only_weights: bool = False) -> None:
    """Raise ``CheckpointError`` with all model settings that differ from ``stored``, the flat settings of a run.

    Floats are compared in float32 precision. Settings without effect both in this run and with the stored
    settings, and those named in ``--changed-model-settings``, may differ. ``only_weights``: the run starts with the
    weights, to which features may add others, and does not resume the training.
    """
    for added in missing_in(stored, config):
        stored = added.compared(stored, only_weights=only_weights)
    allowed, current = config.checkpoint.changed_model_settings, config.flat()
    # Also the settings of these sections that may differ: the effect of one setting may depend on another one.
    sections = {s: names_by_resume(s, Resume.FUNCTION, Resume.TENSORS) for s in section_types().values()}
    compared = [name for names in sections.values() for name in names if name in stored]
    different = [name for name in compared if not _equal(stored[name], current[name])]
    of_model = {item.name for section, names in sections.items() if names for item in fields(section)} & stored.keys()
    before = RunConfig.from_flat(current | {name: stored[name] for name in of_model})
    changed = [name for name in different if name not in allowed and any(has_effect(name, c) for c in (config, before))]
    faults = {}
    for name in changed:
        compare = settings()[name].difference
        difference = None if compare is None else compare(config, before)
        if difference is None:
            faults[name] = f"{name}={current[name]!r}, but the checkpoint was trained with {name}={stored[name]!r}"
        elif difference[1]:
            faults[name] = f"{name} has {difference[0]} {listed(difference[1])}"
    if faults:
        function = " ".join(name for name in faults if settings()[name].resume is Resume.FUNCTION)
        way_out = "; to use the weights with these settings, add --changed-model-settings " + function
        raise CheckpointError(
            "\n  - ".join(["this checkpoint is of another model:", *faults.values()])
            + f"\ngive the same settings{way_out if function else ''}"
        )


def check_features(stored: Mapping[str, Any], config: RunConfig, folder: Path) -> None:
    """Raise ``CheckpointError`` if features cannot resume a run with the stored settings."""
    for feature in features():
        for problem in () if feature.resume_problems is None else feature.resume_problems(stored, config, folder):
            raise CheckpointError(problem)


def check_state(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Check the types of all values that a run reads from a checkpoint's state, and return the stored settings.

    Errors: ``CheckpointError`` with the names of all invalid values.
    """
    # Counters, records and loss scale.
    faults = []
    state = {"rollbacks": 0, "left_out": [], "data": [], **state}  # absent in checkpoints of earlier releases
    for name in COUNTERS:
        if not _is_counter(state.get(name)):
            faults.append(name)
    left_out = state.get("left_out")
    if not isinstance(left_out, list) or not all(map(_is_counter, left_out)):
        faults.append("left_out")
    if not isinstance(state["data"], list) or not all(map(is_record, state["data"])):
        faults.append("data")
    scale, stored = state.get("loss_scale"), state.get("config")
    if not isinstance(scale, dict) or not all(isinstance(value, int | float) for value in scale.values()):
        faults.append("loss_scale")
    if not isinstance(state.get("layout"), str):
        faults.append("layout")
    if not isinstance(state.get("validation_loss"), int | float | None):
        faults.append("validation_loss")
    # Settings: each known one must convert to the type of its field.
    for name, value in stored.items() if isinstance(stored, dict) else ():
        try:
            if name in KINDS:
                convert(value, KINDS[name])
        except (TypeError, ValueError, OverflowError):
            faults.append(name)
    if faults or not isinstance(stored, dict):
        raise CheckpointError(
            f"{folder / MANIFEST}: invalid {listed(faults or ['config'])}; load another iteration with --ckpt-step"
        )
    return stored


def _is_counter(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48


def schedule_changes(stored: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Describe the differences between the schedule of the resumed checkpoint and the schedule of this run.

    Errors: ``CheckpointError`` with all differences, unless ``override_opt_param_scheduler`` is set.
    """
    current, stored = config.flat(), dict(stored)
    for unit in ("iters", "samples"):  # without lr_decay_*, decay ended at the last step
        if stored.get(f"lr_decay_{unit}", 0) is None and current[f"lr_decay_{unit}"] is not None:
            stored[f"lr_decay_{unit}"] = stored[f"train_{unit}"]
    changes = [
        f"{name} was {stored[name]} and is {current[name]}"
        for name in SCHEDULE
        if name in stored and not _equal(stored[name], current[name])
    ]
    if changes and not config.checkpoint.override_opt_param_scheduler:
        is_later = stored.get("lr_one_step_later", False) and not config.optimizer.lr_one_step_later
        reason = (
            " (Megatron-LM applies each rate one step later: add --lr-one-step-later or --as-megatron)"
            if is_later
            else ""
        )
        raise CheckpointError(
            f"the schedule differs from that of the resumed run: {'; '.join(changes)}{reason}. Give the same settings, "
            "or continue with the new settings by --override-opt-param-scheduler"
        )
    return changes


def differing_settings(stored: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Describe the other differences from the resumed run that change the numerical results.

    A vocabulary without a size has that of the tokenizer, and the shapes of the weights are compared with it.
    """
    current = config.flat()
    if None in (current["vocab_size"], stored.get("vocab_size")):
        stored = {name: value for name, value in stored.items() if name != "vocab_size"}
    return [
        f"{name} was {stored[name]} and is {current[name]}"
        for name, declared in settings().items()
        if declared.resume in (Resume.REPORTED, Resume.TOKENS)
        and name in stored
        and not _equal(stored[name], current[name])
    ]


def moved_end(stored: Mapping[str, Any], config: RunConfig) -> str:
    """Describe the jump of rates that change until the last step if the last step changed; else ""."""
    current, optimizer = config.flat(), config.optimizer
    ends = [name for name in ("train_iters", "train_samples") if stored.get(name, current[name]) != current[name]]
    ends_by_default = (optimizer.lr_decay_iters, optimizer.lr_decay_samples) == (None, None)
    decays = ends_by_default and optimizer.lr_decay_style not in ("constant", "inverse-square-root")
    rates = ["the learning rate (--lr-decay-iters or --lr-decay-samples keeps it)"] * decays
    rates += ["the weight decay"] * (optimizer.weight_decay_incr_style != "constant")
    changes = " and ".join(f"{name} was {stored[name]} and is {current[name]}" for name in ends)
    text = f"the last step determines {' and '.join(rates)}: {changes}; there is a jump to other values"
    return text if ends and rates else ""


def stored_config(folder: Path) -> RunConfig:
    """The configuration stored in the checkpoint in ``folder``; paths of tokenizer files refer to the copies in it."""
    for form in () if (folder / MANIFEST).is_file() else formats_in(folder, resumes=True):
        return RunConfig.from_flat(form.settings(folder))
    state = Manifest.read(folder / MANIFEST).state
    settings = check_state(state, folder)
    config = RunConfig.from_flat({name: value for name, value in settings.items() if name in KINDS})
    data, copies = config.data, tokenizer_folder(folder)
    files = {name: getattr(data, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    for name, path in files.items():
        # The files named by the settings may be gone or changed; the copies are those with which the model was trained.
        if path is not None and copies.is_dir():
            file = copies / Path(path).name
            files[name] = str(file if file.is_file() else copies)
    if data.chat_template is not None and (copies / TEMPLATE_FILE).is_file():
        files["chat_template"] = str(copies / TEMPLATE_FILE)
    vocab_size = state["vocab_size"] if data.tokenizer is None else data.vocab_size
    return replace(config, data=replace(data, vocab_size=vocab_size, **files))


def tokenizer_folder(folder: Path) -> Path:
    """The folder with the tokenizer files of the checkpoint in ``folder``, which may be absent; from object storage, a
    copy on this machine."""
    copies = folder / "tokenizer"
    return local_copy(copies) if copies.is_dir() else copies


def _other_formats(load: str | Path, *, resumes: bool | None = None) -> list[CheckpointFormat]:
    """The formats of other programs in a folder on this machine without a checkpoint of this program."""
    folder = location(load)
    if in_storage(folder) is not None or (folder / MANIFEST).is_file() or complete_iterations(folder):
        return []
    return formats_in(folder, resumes=resumes)


def format_to_resume(load: str | None) -> CheckpointFormat | None:
    """The format of another program in ``load`` whose training --load continues; None if there is none."""
    return None if load is None else next(iter(_other_formats(load, resumes=True)), None)


def refuse_other_formats(named: str, load: str | Path) -> None:
    """``CheckpointError`` with the way to read it if ``load`` is of another program and --load does not continue it.

    ``named`` is the setting with its value.
    """
    for form in _other_formats(load, resumes=False):
        if refusal := form.refusal(named, location(load)):
            raise CheckpointError(refusal)


def open_model(
    load: str, step: int | None = None, device: torch.device = CPU, name: str = "load"
) -> tuple[StateReader, RunConfig]:
    """Open ``load``, a checkpoint of this or another program; return its reader and the configuration of its model.

    A collective call, with messages on ``device``. Errors: ``CheckpointError``, with the ``name`` of the setting, if
    there is no checkpoint, or only the weights that a feature adds to a model.
    """
    for form in _other_formats(load):
        if form.is_openable:
            folder = form.iteration_folder(location(load), step)
            return form.open(folder, finetune=True), RunConfig.from_flat(form.settings(folder))
    reader = open_newest(load, step, device=device)
    if reader is None:
        refuse_other_formats(f"{name}={load!r}", load)
        raise CheckpointError(
            f"{name}={load!r} has no checkpoint and no config.json; give a folder written with --save, or of Hugging "
            "Face"
        )
    config = stored_config(reader.folder)
    if (added := weights_saved_alone(config)) is not None:
        with reader:
            raise CheckpointError(
                f"{name}={load!r} has {added.title} without the weights of the model; "
                f"run tools/convert_checkpoint.py --from native --to hf --load {load} --save MERGED, and load MERGED"
            )
    return reader, config


def model_and_tokenizer(config: RunConfig) -> RunConfig:
    """Return ``config`` with all settings reset to their defaults, except model, sequence length and tokenizer."""
    model = ModelConfig(**{name: getattr(config.model, name) for name in model_settings()})
    if model.position_embedding_type == "learned_absolute":
        model = replace(model, max_position_embeddings=config.max_positions)
    return RunConfig(model=model, data=DataConfig(**{name: getattr(config.data, name) for name in TOKENS}))


def settings_folder(settings: CheckpointConfig) -> Path | None:
    """The checkpoint from which ``use_checkpoint_args`` and ``use_checkpoint_opt_param_scheduler`` take settings.

    It is the newest checkpoint with intact manifest and tokenizer. If its tensors are damaged, the run loads an older
    checkpoint, and ``with_settings_of`` takes the settings from that. Errors: ``CheckpointError`` if none is intact.
    """
    if settings.load is None:
        return None
    if (form := format_to_resume(settings.load)) is not None:
        return form.iteration_folder(location(settings.load), settings.ckpt_step)
    is_global = settings.non_persistent_ckpt_type == "global"
    temporary = settings.temporary_folder(settings.load) if is_global else None
    return find_newest(settings.load, settings.ckpt_step, temporary, verify=settings.verify_checkpoint)


def with_stored_schedule(config: RunConfig) -> RunConfig:
    """Return ``config`` with learning rate, weight decay and their schedules from the checkpoint to load, if
    ``use_checkpoint_opt_param_scheduler`` is set and a checkpoint exists."""
    if not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return config
    folder = settings_folder(config.checkpoint)
    if folder is None:
        return config
    return RunConfig.from_flat(config.flat() | _schedule(stored_config(folder)))


def with_settings_of(config: RunConfig, folder: Path) -> RunConfig:
    """Replace the settings of ``config`` that came from another checkpoint by the settings stored in ``folder``.

    Settings changed by flags or --config are kept.
    """
    source = settings_folder(config.checkpoint) if takes_settings(config.checkpoint) else None
    if source is None or source == folder:
        return config
    current = config.flat()
    before, after = (_taken(stored_config(checkpoint), config.checkpoint) for checkpoint in (source, folder))
    # A setting that differs from the first checkpoint was given by a flag or --config, and is kept.
    changed = {name: after[name] for name in before if current[name] == before[name] != after[name]}
    if changed:
        note(f"settings taken from the loaded checkpoint {folder}: {listed(list(changed))}")
    return RunConfig.from_flat(current | changed)


def takes_settings(settings: CheckpointConfig) -> bool:
    """Whether settings of the run come from the checkpoint that is loaded."""
    return settings.use_checkpoint_args or settings.use_checkpoint_opt_param_scheduler


def _taken(stored: RunConfig, settings: CheckpointConfig) -> dict[str, Any]:
    """The settings that a run takes from a checkpoint."""
    taken: dict[str, Any] = {}
    if settings.use_checkpoint_args:
        again = model_and_tokenizer(stored)
        taken |= {name: getattr(again.model, name) for name in model_settings()}
        taken |= {name: getattr(again.data, name) for name in TOKENS}
    return taken | (_schedule(stored) if settings.use_checkpoint_opt_param_scheduler else {})


def _schedule(stored: RunConfig) -> dict[str, Any]:
    unit = "samples" if stored.schedules_by_samples else "iters"
    last = None if stored.optimizer.lr_decay_style == "constant" else getattr(stored.training, f"train_{unit}")
    schedule = {name: getattr(stored.optimizer, name) for name in SCHEDULE}
    return schedule | {f"lr_decay_{unit}": schedule[f"lr_decay_{unit}"] or last}  # a decay ends at the last step


def _equal(stored: Any, current: Any) -> bool:
    if isinstance(stored, float) and isinstance(current, float):
        return isclose(stored, current, rel_tol=2.0**-23)
    return (tuple(stored) if isinstance(current, tuple) and stored is not None else stored) == current
