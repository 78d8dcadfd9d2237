"""The state of a training of Megatron-LM, as the state of a run of this project."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from megatron_core.checkpoint import CheckpointReader
from megatron_core.checkpoint.formats import CheckpointFormat, Exchange
from megatron_core.config import ModelConfig, RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm import MegatronReader
from megatron_core.hub.megatron_lm.arguments import MegatronProgress, training_settings
from megatron_core.hub.megatron_lm.reader import megatron_iteration_folder
from megatron_core.hub.megatron_lm.writer import Format, write_checkpoint
from megatron_core.locations import location
from megatron_core.training.compatibility import format_to_resume


def state_at(progress: MegatronProgress | None, vocab_size: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint at ``progress``, or of iteration 0; ``settings`` are the flat settings of the run."""
    samples = 0 if progress is None else progress.consumed_samples
    return {
        "iteration": 0 if progress is None else progress.iteration,
        "consumed_samples": samples,
        "consumed_tokens": samples * int(settings.get("seq_length", 0)),
        "skipped_iterations": 0 if progress is None else progress.skipped_iterations,
        "skipped_samples": 0 if progress is None else progress.skipped_samples,
        "layout": "",
        "optimizer_steps": 0 if progress is None else progress.optimizer_steps,
        "loss_scale": {} if progress is None else dict(progress.loss_scale),
        "vocab_size": vocab_size,
        "config": {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
    }


class MegatronFormat(CheckpointFormat):
    """Trainings of Megatron-LM, which --load continues, and which --ckpt-format writes."""

    is_openable = resumes = True

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has files of the format."""
        folders = (folder, *folder.glob("iter_*"), folder / "release")
        return any((path / ".metadata").is_file() or any(path.glob("mp_rank_*/*.pt")) for path in folders)

    def refusal(self, named: str, folder: Path, step: int | None = None) -> str:
        """The command that converts the folder."""
        source = folder.absolute()
        target = shlex.quote(f"{source}-converted")
        iteration = "" if step is None else f" --ckpt-step {step}"
        return (
            f"{named} is a checkpoint of Megatron-LM; run megatron-convert --from megatron --to native --load "
            f"{shlex.quote(str(source))} --save {target}{iteration}, then give --load {target}"
        )

    def settings(self, folder: Path) -> dict[str, Any]:
        """Flat settings of a run that trains the stored model."""
        return megatron_config(folder).flat()

    def iteration_folder(self, root: Path, step: int | None) -> Path:
        """The folder of iteration ``step``, by default the latest."""
        return megatron_iteration_folder(root, step)

    def open(self, root: Path, step: int | None = None, *, finetune: bool = False) -> MegatronReader:
        """As the base class. Errors: ``CheckpointError`` if counters are missing, unless ``finetune``."""
        reader = MegatronReader(megatron_iteration_folder(root, step))
        progress = None if finetune else reader.progress()
        stored = reader.settings | (dict(progress.settings) if progress is not None else {})
        reader.state = state_at(progress, reader.state["vocab_size"], stored)
        return reader

    def write(self, native: Path, model: ModelConfig, save: Path, *, rank: int, ranks: int, exchange: Exchange) -> None:
        """Write a share of the checkpoint ``native``."""
        form = cast(Format, save.name)
        with CheckpointReader(native) as reader:
            write_checkpoint(reader, model, save, form, rank=rank, ranks=ranks, exchange=exchange)


def megatron_config(folder: Path) -> RunConfig:
    """The settings of the model, the tokens and the training in an iteration of Megatron-LM."""
    reader = MegatronReader(folder)
    vocabulary = {"vocab_size": reader.state["vocab_size"]}
    return RunConfig.from_flat(reader.settings | vocabulary | training_settings(reader.arguments))


def checkpoint_changes(config: RunConfig) -> Iterator[str]:
    """The flags to add or change if ``load`` is a folder of Megatron-LM's checkpoints."""
    settings = config.checkpoint
    optimizer = config.optimizer
    try:
        form = format_to_resume(settings.load)
        if form is None:
            return
        form.iteration_folder(location(settings.load or ""), settings.ckpt_step)
    except CheckpointError as error:
        yield str(error)
        return
    if settings.save == settings.load:
        yield f"save={settings.save!r} has a checkpoint of Megatron-LM (--load); give another folder with --save"
    is_constant = optimizer.lr_decay_style == "constant" and not (
        optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction
    )
    if not (is_constant or optimizer.lr_one_step_later or settings.finetune):
        yield "the checkpoint in --load is of Megatron-LM; add --as-megatron, or --finetune for a new schedule"
