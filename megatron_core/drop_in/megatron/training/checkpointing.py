"""Checkpoints of the caller's program, their folders, and the number of the latest."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.serialization import COMMON, load_from, save
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.transformer.module import sharded
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_args
from megatron.training.run_config import run_config_of
from megatron.training.utils.common_utils import print_rank_0
from megatron_core.checkpoint import CheckpointReader, open_newest
from megatron_core.checkpoint.folder import TRACKER, iteration_folder
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm import MegatronReader
from megatron_core.hub.megatron_lm.format import MegatronFormat
from megatron_core.locations import location
from megatron_core.parallel import World
from megatron_core.parallel.texts import listed
from megatron_core.training.compatibility import check_same_model, format_to_resume, refuse_other_formats

CheckpointType = Enum("CheckpointType", "LEGACY LOCAL GLOBAL TORCH_DCP FSDP_DTENSOR")
"""Megatron's kinds of checkpoints; checkpoints of this package have one kind."""


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """Return the file with the number of the latest checkpoint."""
    return str(Path(checkpoints_path) / TRACKER)


def get_checkpoint_name(
    checkpoints_path: str,
    iteration: int,
    release: bool = False,
    pipeline_parallel: bool | None = None,
    tensor_rank: int = 0,
    pipeline_rank: int = 0,
    return_base_dir: bool = False,
) -> str:
    """Return the folder of an iteration, or without ``return_base_dir`` Megatron-LM's file of a rank."""
    root = Path(checkpoints_path)
    base = root / "release" if release else iteration_folder(root, iteration)
    stages = f"_{pipeline_rank:03d}" if pipeline_parallel else ""
    return str(base if return_base_dir else base / f"mp_rank_{tensor_rank:02d}{stages}" / "model_optim_rng.pt")


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """Return (latest iteration, whether it is a release, whose iteration is 0) of a tracker file."""
    text = Path(tracker_filename).read_text().strip()
    if text == "release":
        return 0, True
    if not text.isdigit():
        raise CheckpointError(f"{tracker_filename} contains {text[:50]!r}; write the number of an iteration to it")
    return int(text), False


def read_frozen_resume_iteration(load_dir: str | None) -> int:
    """Return the iteration of the latest checkpoint; 0 without a checkpoint."""
    tracker = load_dir and get_checkpoint_tracker_filename(load_dir)
    return read_metadata(tracker)[0] if tracker and Path(tracker).is_file() else 0


def get_load_checkpoint_path_by_args(args: Any, load_arg: str = "load") -> str:
    """Return the folder of ``args.ckpt_step``, or of the latest checkpoint in ``args.load``."""
    root = getattr(args, load_arg)
    if root is None:
        raise CheckpointError(f"--{load_arg} is not given; name the folder of the checkpoints")
    if step := getattr(args, "ckpt_step", None):
        return get_checkpoint_name(root, step, return_base_dir=True)
    return get_checkpoint_name(root, *read_metadata(get_checkpoint_tracker_filename(root)), return_base_dir=True)


def save_checkpoint(
    iteration: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: int,
    checkpointing_context: Any = None,
    **others: Any,
) -> None:
    """Write chunks, optimizer and scheduler (None: absent) to ``iter_...`` in ``get_args().save``.

    ``load_checkpoint`` can load it in every layout. Raises CheckpointError if ``others`` select a release or a
    non-persistent checkpoint.
    """
    args = get_args()
    asked = [name for name in ("non_persistent_ckpt", "release") if others.get(name)]
    if asked:
        raise CheckpointError(f"save_checkpoint: {', '.join(asked)} is not supported; remove it")
    state = _state(model, None if args.no_save_optim else optimizer, opt_param_scheduler) | {
        "iteration": iteration,
        "consumed_train_samples": args.consumed_train_samples,
        "consumed_valid_samples": args.consumed_valid_samples,
        "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
    }
    save(state, args.save, iteration=iteration)
    print_rank_0(f"  successfully saved checkpoint from iteration {iteration:7d} to {args.save}")


_SCHEDULES = ("max_lr", "min_lr", "start_wd", "end_wd")


def _copy_schedules(groups: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """Copy the schedules of ``groups`` to the matching groups of ``others``.

    If several groups match, they are paired in the order of their learning rates.
    """

    def key(group: dict[str, Any]) -> tuple[Any, ...]:
        rest = [name for name in param_group_identifier_keys if name not in _SCHEDULES]
        fixed = tuple(repr(group.get(name, group.get(f"pre_{name}"))) for name in (*rest, "default_config"))
        return (*fixed, group["max_lr"])

    ours, theirs = sorted(groups, key=key), sorted(others, key=key)
    if [key(group)[:-1] for group in ours] == [key(group)[:-1] for group in theirs]:
        for source, target in zip(ours, theirs, strict=True):
            target.update({name: source[name] for name in _SCHEDULES if name in source})


def _state(model: Sequence[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{number}": sharded(chunk) for number, chunk in enumerate(unwrap_model(model))}
    for name, part in (("optimizer", optimizer), ("opt_param_scheduler", scheduler)):
        if part is not None:
            state[name] = part.sharded_state_dict() if name == "optimizer" else part.state_dict()
    return state


def _open(args: Any, root: Any) -> CheckpointReader | MegatronReader | None:
    """Open the newest checkpoint in ``root``, of this package or of Megatron-LM; None if there is none."""
    if format_to_resume(root) is None:
        verify = getattr(args, "verify_checkpoint", True)
        return open_newest(root, args.ckpt_step, verify=verify, device=World.from_environment().device)
    reader = MegatronFormat().open(location(root), args.ckpt_step, finetune=args.finetune)
    check_same_model(reader.settings, run_config_of(args), only_weights=args.finetune)
    state = reader.state
    common = {"iteration": state["iteration"], "consumed_train_samples": state["consumed_samples"]}
    common["consumed_valid_samples"] = reader.arguments.get("consumed_valid_samples") or 0
    common["optimizer.state.steps_taken"] = state["optimizer_steps"]
    common |= {f"optimizer.state.loss_scale.{name}": value for name, value in state["loss_scale"].items()}
    common |= {f"opt_param_scheduler.{name}": value for name, value in reader.schedule.items()}
    reader.state = {COMMON: common}
    return reader


def _check_kinds(reader: MegatronReader, optimizer: dict[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint does not have all kinds of the optimizer's state."""
    needed = {name.split(".")[1] for name in optimizer if name != "state"} - {"main"}
    if absent := sorted(needed - set(reader.kinds)):
        raise CheckpointError(
            f"{reader.folder} has no state of this optimizer ({listed(absent)}); {reader.fault_of_state} load only the "
            "weights with --no-load-optim"
        )


def load_args_from_checkpoint(args: Any, load_arg: str = "load", checkpointing_context: Any = None) -> Any:
    """Raise CheckpointError: ``parse_args`` reads the settings of a checkpoint, because defaults depend on them."""
    raise CheckpointError(
        f"use_checkpoint_args: pass --use-checkpoint-args --load {getattr(args, load_arg)} on the command line instead"
    )


def load_checkpoint(
    ddp_model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: Any = None,
    **others: Any,
) -> tuple[int, int]:
    """Load chunks, optimizer and scheduler (None: absent) from the folder in ``get_args()``; set its consumed samples.

    The checkpoint is of this package, or of Megatron-LM in each of its formats. Returns (iteration, floating point
    operations): (0, 0) for a folder without a checkpoint, and with --finetune, which loads only weights. The hashes
    of this package's files are compared first; if the newest checkpoint is damaged, an older one is loaded. If
    learning rates, weight decay or their schedules differ, --override-opt-param-scheduler keeps those of the program
    and --use-checkpoint-opt-param-scheduler takes the stored ones.

    Raises CheckpointError if there is no checkpoint with --exit-on-missing-checkpoint, if it is of another model or
    optimizer, or if schedules differ without one of the two flags.
    """
    args = get_args()
    stored = _open(args, getattr(args, load_arg))
    if stored is None:
        refuse_other_formats(f"{load_arg}={getattr(args, load_arg)!r}", getattr(args, load_arg))
        if args.exit_on_missing_checkpoint or not strict:
            raise CheckpointError(f"{load_arg}={getattr(args, load_arg)!r} has no checkpoint")
        print_rank_0(f"WARNING: {load_arg}={getattr(args, load_arg)!r} has no checkpoint; weights are not loaded")
        return 0, 0
    # Fill the tensors of the model, and unless fine-tuning starts, those of the optimizer.
    resumes = not args.finetune
    reads_optimizer = resumes and optimizer is not None and not args.no_load_optim
    counts = dict.fromkeys(("iteration", "consumed_train_samples", "consumed_valid_samples"), 0)
    scheduler = opt_param_scheduler if resumes else None
    state = _state(ddp_model, optimizer if reads_optimizer else None, scheduler) | counts
    if reads_optimizer and isinstance(stored, MegatronReader):
        _check_kinds(stored, state["optimizer"])
    state = load_from(stored, state | {"num_floating_point_operations_so_far": 0})
    # Restore the scheduler and the optimizer.
    if scheduler is not None:
        scheduler.load_state_dict(state["opt_param_scheduler"])
    if reads_optimizer:
        saved = state["optimizer"]["state"]["param_groups"]
        if args.override_opt_param_scheduler:
            _copy_schedules(optimizer.param_groups, saved)
        elif args.use_checkpoint_opt_param_scheduler:
            _copy_schedules(saved, optimizer.param_groups)
        optimizer.load_state_dict(state["optimizer"])
        if scheduler is not None:
            scheduler.step(0)  # the optimizer has restored the rates of the saved step
    elif optimizer is not None:
        optimizer.reload_model_params()
    if not resumes:
        return 0, 0
    # Restore the counts; sample numbers are the keys of dropout.
    args.consumed_train_samples = state["consumed_train_samples"]
    args.consumed_valid_samples = state["consumed_valid_samples"]
    for chunk in unwrap_model(ddp_model):
        if isinstance(chunk, GPTModel):
            chunk.samples.taken = args.consumed_train_samples
    return state["iteration"], state["num_floating_point_operations_so_far"]
