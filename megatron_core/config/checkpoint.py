"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, BY_RULE, section, setting

TEMPORARY_FOLDER = "non_persistent"
"""The default folder, below --save, of checkpoints for a fast restart."""


@dataclass(frozen=True, kw_only=True)
@section()
class CheckpointConfig:
    """Where checkpoints are written and read. A checkpoint can be loaded in any layout."""

    save: str | None = setting(None, r.FOLDER, when=c.TRAINING)
    """Folder to write checkpoints to: at the end of the run, and every --save-interval steps."""
    save_interval: int | None = setting(None, r.COUNT, when=c.TRAINING, aliases="persistent_save_interval")
    """With --save: steps between checkpoints; default none before the end of the run."""
    save_retain_interval: int | None = setting(None, r.COUNT, needs=c.SAVE, aliases="keep_every")
    """Keep checkpoints of multiples of this many steps (--keep-every is the same), and the newest --keep-last; delete
    others when the next is complete."""
    keep_last: int | None = setting(None, r.COUNT, needs=c.SAVE)
    """Keep this many newest checkpoints; default all, or 1 with --save-retain-interval."""
    overwrite_checkpoints: bool = setting(False, needs=c.SAVE)
    """With --save: a folder with checkpoints of another run is taken over; those are deleted once the first of this
    run is complete. Otherwise it is an error to start anew over them."""
    async_save: bool = setting(False, needs=c.SAVE, when=c.TRAINING)
    """Write checkpoints in the background, from a copy in the host's memory, while the training goes on."""
    non_persistent_save_interval: int | None = setting(None, r.COUNT, needs=c.SAVE)
    """With --save: steps between checkpoints for a fast restart, of which only the newest is kept."""
    non_persistent_ckpt_type: Literal["global", "local"] = setting("global", needs=c.FAST_RESTART)
    """Where these are: global: in one folder that all ranks see; local: each host keeps those of its own ranks in its
    own memory."""
    non_persistent_global_ckpt_dir: str | None = setting(None, r.FOLDER, needs=(c.FAST_RESTART, c.GLOBAL_FAST_RESTART))
    """Folder of these, which all ranks see, such as /dev/shm/NAME on one host; default non_persistent in that of
    --save. It must not hold other checkpoints, nor in /dev/shm belong to another user; a new one there has mode 700."""
    non_persistent_local_ckpt_dir: str | None = setting(None, r.FOLDER, needs=c.LOCAL_FAST_RESTART)
    """Folder of these in the memory of each host, such as /dev/shm/NAME. It must not hold other checkpoints, nor belong
    to another user; a new one there has mode 700."""
    replication: bool = setting(False, needs=c.LOCAL_FAST_RESTART)
    """With --non-persistent-ckpt-type local: other hosts keep copies, so that a lost host costs nothing."""
    replication_jump: int | None = setting(None, r.COUNT, needs=c.REPLICATION)
    """How many ranks further the copies of a rank are kept; default as many as a host has."""
    replication_factor: int = setting(2, r.integer(2), needs=c.REPLICATION)
    """Hosts that have what a rank has written, its own included."""
    use_checkpoint_opt_param_scheduler: bool = setting(False, when=c.LOAD)
    """With --load: take learning rate and weight decay with their schedules from the checkpoint, not from the flags."""
    load: str | None = setting(None, r.FOLDER, when=BY_RULE)
    """Folder of checkpoints to resume from; an empty or absent one starts from scratch, and says so."""
    load_hf: str | None = setting(None, r.FOLDER, when=ALWAYS)
    """Folder of a Hugging Face model to start from: its shape, vocabulary and tokenizer are the defaults of the flags,
    its weights the initial weights. A checkpoint in the folder of --load takes precedence, so that a restarted job
    resumes."""
    hf_model_type: str | None = setting(None, when=ALWAYS)
    """Architecture as which the model is exported, such as llama (tools/convert_checkpoint.py); default: the one of
    --load-hf, or the first that fits."""
    verify_checkpoint: bool = setting(True, when=c.LOAD)
    """Compare the size and hash of every file of a checkpoint before it is loaded."""
    ckpt_step: int | None = setting(None, r.COUNT_FROM_0, needs=c.LOAD)
    """Iteration to load; default the latest."""
    use_checkpoint_args: bool = setting(False, needs=c.LOAD)
    """With --load: take model, sequence length and tokenizer settings from the checkpoint; flags and --config override
    them."""
    finetune: bool = setting(False, needs=c.LOAD)
    """With --load: load only the weights, and start at iteration 0."""
    changed_model_settings: tuple[str, ...] = setting((), needs=c.LOAD)
    """With --load: names of model settings that may differ from the checkpoint's, such as rotary_base."""
    override_opt_param_scheduler: bool = setting(False, when=(c.LOAD, c.NO_FINETUNE, c.OWN_SCHEDULE))
    """Go on with the learning rates and weight decay of this command line where they differ from the checkpoint's."""
    no_load_optim: bool = setting(False, when=(c.LOAD, c.NO_FINETUNE))
    """Do not load the optimizer's state."""
    no_save_optim: bool = setting(False, when=c.SAVE)
    """Do not save the optimizer's state."""
    exit_on_missing_checkpoint: bool = setting(False, when=c.LOAD)
    """With --load: a folder without checkpoints is an error, as it always is with --finetune, --ckpt-step and
    --use-checkpoint-args."""

    @property
    def local_folder(self) -> Path | None:
        """Where each host keeps checkpoints for a fast restart in its own memory; None if it does not."""
        return Path(self.non_persistent_local_ckpt_dir or ".") if self.non_persistent_ckpt_type == "local" else None

    def temporary_folder(self, root: str) -> Path:
        """Where the checkpoints for a fast restart are that all ranks see, of a run that saves into ``root``."""
        return Path(self.non_persistent_global_ckpt_dir or Path(root) / TEMPORARY_FOLDER)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether --load without a checkpoint is an error."""
        asked = self.exit_on_missing_checkpoint or self.finetune or self.use_checkpoint_args
        return asked or self.ckpt_step is not None

    def for_resume(self) -> CheckpointConfig:
        """The settings for a job that resumes from the checkpoints of this one."""
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
