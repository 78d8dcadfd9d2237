"""Saving and loading."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, BY_RULE, section, setting
from megatron_core.feature import Extensible
from megatron_core.locations import is_same_place, location, run_folder

TEMPORARY_FOLDER = "non_persistent"
"""Default folder, below --save, of checkpoints for a fast restart."""


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """A row of ``Feature.checkpoint_formats``."""

    hook: str
    """Class derived from ``checkpoint.formats.CheckpointFormat``."""
    setting: str | None = None
    """Setting that names a folder in this format, from which settings without a flag are taken."""
    writes: tuple[str, ...] = ()
    """Values of --ckpt-format that it writes."""


@dataclass(frozen=True, kw_only=True)
@section()
class CheckpointConfig(Extensible):
    """Folders, intervals and contents of checkpoints. A checkpoint can be loaded in any layout."""

    save: str | None = setting(None, r.FOLDER, when=c.TRAINING)
    """Folder or URL (docs/storage.md) for checkpoints, every --save-interval steps and at the end of the run."""
    save_interval: int | None = setting(None, r.COUNT, when=c.TRAINING, aliases="persistent_save_interval")
    """With --save: steps between checkpoints; default: only at the end of the run."""
    save_retain_interval: int | None = setting(None, r.COUNT, needs=c.SAVE, aliases="keep_every", is_refinement=True)
    """Keep checkpoints whose step is a multiple of this (also --keep-every) and the newest --keep-last; delete the
    others when a newer one is complete."""
    keep_last: int | None = setting(None, r.COUNT, needs=c.SAVE)
    """Number of newest checkpoints to keep; default: all, or 1 with --save-retain-interval."""
    overwrite_checkpoints: bool = setting(False, needs=c.SAVE)
    """With --save: replace checkpoints of another run in the folder; they are deleted when the first checkpoint of this
    run is complete. Without this flag, such a folder is an error for a run that starts at iteration 0."""
    ckpt_format: Literal["native", "torch_dist", "torch_dcp"] = setting(
        "native", when=(c.SAVE, c.TRAINING), aliases="dist_ckpt_format"
    )
    """With --save: also write checkpoints in another format, below --save in a folder of its name. torch_dist: for
    Megatron Core, with the state of Adam. torch_dcp: tensors under the names of this framework for
    torch.distributed.checkpoint. They are all kept. Training waits while they are written, also with --async-save."""
    ckpt_format_interval: int | None = setting(None, r.COUNT, needs=c.OTHER_FORMAT)
    """With --ckpt-format: write the other format only at steps that are multiples of this; default: each checkpoint."""
    non_persistent_save_interval: int | None = setting(None, r.COUNT, needs=c.SAVE)
    """With --save: steps between checkpoints for a fast restart; only the newest one is kept."""
    non_persistent_ckpt_type: Literal["global", "local"] = setting("global", needs=c.FAST_RESTART)
    """Place of checkpoints for a fast restart. global: one folder that all ranks can read. local: the memory of each
    host, for its own ranks."""
    non_persistent_global_ckpt_dir: str | None = setting(None, r.FOLDER, needs=(c.FAST_RESTART, c.GLOBAL_FAST_RESTART))
    """Folder for checkpoints for a fast restart that all ranks can read, such as /dev/shm/NAME on one host; default:
    non_persistent below --save. It must not contain other checkpoints or, in /dev/shm, belong to another user; a new
    folder in /dev/shm has mode 700."""
    use_checkpoint_opt_param_scheduler: bool = setting(False, when=c.LOAD)
    """With --load: take learning rate, weight decay and their schedules from the checkpoint instead of the flags."""
    load: str | None = setting(None, r.FOLDER, when=BY_RULE)
    """Folder or URL of checkpoints to resume from. If it has none, it must be the folder of --save, as in a job that is
    restarted: training then starts from scratch with a message. Any other folder without a checkpoint is an error."""
    load_hf: str | None = setting(None, r.FOLDER, when=ALWAYS)
    """Folder of a Hugging Face model to start from. Its shape, vocabulary and tokenizer become the defaults of flags,
    its weights the initial weights. A checkpoint in --load takes precedence, so that a restarted job resumes."""
    hf_model_type: str | None = setting(None, when=ALWAYS)
    """Architecture for export to Hugging Face, such as llama (megatron-convert); default: the architecture
    of --load-hf, or the first one that fits the model."""
    verify_checkpoint: bool = setting(True, when=c.LOAD)
    """Check the size and hash of every file of a checkpoint that is loaded."""
    ckpt_step: int | None = setting(None, r.COUNT_FROM_0, needs=c.LOAD)
    """Iteration to load; default: the latest."""
    use_checkpoint_args: bool = setting(False, needs=c.LOAD)
    """With --load: take settings of model, sequence length and tokenizer from the checkpoint; flags and --config
    override them."""
    finetune: bool = setting(False, needs=c.LOAD)
    """With --load: load only the weights and start at iteration 0."""
    changed_model_settings: tuple[str, ...] = setting((), needs=c.LOAD)
    """With --load: names of model settings, such as rotary_base, that may differ from the checkpoint."""
    override_opt_param_scheduler: bool = setting(False, when=(c.LOAD, c.NO_FINETUNE, c.OWN_SCHEDULE))
    """With --load: use learning rate, weight decay and their schedules of this command line, not of the checkpoint."""
    no_load_optim: bool = setting(False, when=(c.LOAD, c.NO_FINETUNE))
    """Do not load the optimizer's state."""
    no_save_optim: bool = setting(False, when=c.SAVE)
    """Do not save the optimizer's state."""
    exit_on_missing_checkpoint: bool = setting(False, when=c.LOAD)
    """With --load: exit with an error if the folder has no checkpoint, also if it is that of --save, as always with
    --finetune, --ckpt-step and --use-checkpoint-args."""

    def temporary_folder(self, root: str) -> Path:
        """Global folder for checkpoints for a fast restart of a run that saves to ``root``."""
        return location(self.non_persistent_global_ckpt_dir or f"{root.rstrip('/')}/{TEMPORARY_FOLDER}")

    @property
    def run_folder(self) -> Path | None:
        """Folder on this machine for the other files of the run, such as metrics; None without ``save``."""
        return None if self.save is None else run_folder(self.save)

    @property
    def asks_for_checkpoint(self) -> bool:
        """Whether a setting requires a checkpoint in --load."""
        by_switch = self.exit_on_missing_checkpoint or self.finetune or self.use_checkpoint_args
        return by_switch or self.ckpt_step is not None

    @property
    def needs_checkpoint(self) -> bool:
        """Whether --load without a checkpoint is an error: only the folder of --save may be new."""
        if self.load is None or self.save is None:
            return True
        return self.asks_for_checkpoint or not is_same_place(self.load, self.save)

    def for_resume(self) -> "CheckpointConfig":
        """The settings for a job that resumes from the checkpoints of this one."""
        # A job that resumes must not start from scratch if its folder is gone.
        return replace(
            self,
            load=self.save,
            load_hf=None,
            ckpt_step=None,
            use_checkpoint_args=False,
            finetune=False,
            changed_model_settings=(),
            overwrite_checkpoints=False,
            no_load_optim=False,
            override_opt_param_scheduler=False,
            exit_on_missing_checkpoint=True,
        )
