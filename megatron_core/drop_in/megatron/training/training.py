"""Model, optimizer, steps, evaluation and training loop of programs that import ``megatron.training``."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer.distrib_optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import forward_backward, get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.from_arguments import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    get_train_valid_test_num_samples,
)
from megatron.training.global_vars import get_args
from megatron.training.host_batches import host_batches
from megatron.training.models.dist_utils import wrap_model_chunks_with_ddp
from megatron.training.utils.common_utils import print_rank_last
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.world import World

Provider = Callable[..., Any]


def get_model(
    model_provider_func: Provider,
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: Any = None,
    pg_collection: Any = None,
) -> list[Any]:
    """Build this rank's model chunks on its device, in ``Float16Module`` with --bf16 or --fp16, and in
    ``DistributedDataParallel``.

    ``model_provider_func`` receives ``pre_process``, ``post_process``, ``config``, ``pg_collection`` and, with several
    chunks, ``vp_stage``, as far as it has parameters of these names.
    """
    args, chunks = get_args(), parallel_state.get_virtual_pipeline_model_parallel_world_size()
    args.model_type = model_type
    models = []
    for chunk in range(chunks or 1):
        stage = None if chunks is None else chunk
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        given = {
            "pre_process": parallel_state.is_pipeline_first_stage(False, stage),
            "post_process": parallel_state.is_pipeline_last_stage(False, stage),
        }
        others = {"config": config, "pg_collection": pg_collection} | ({} if stage is None else {"vp_stage": stage})
        model = _called(model_provider_func, **given, **others).to(World.from_environment().device)
        settings = get_model_config(model)
        if args.fp16 or args.bf16:
            model = Float16Module(settings, model)
        models.append(model)
    if not wrap_with_ddp:
        return models
    flags = ("use_layer_wise_distributed_optimizer", "use_layer_wise_param_layout")
    layer_wise: Any = {name: getattr(args, name) for name in flags if hasattr(args, name)}
    return wrap_model_chunks_with_ddp(models, None, get_megatron_ddp_config(args), **layer_wise)


def _called(function: Provider, *values: Any, **given: Any) -> Any:
    """Call ``function`` with ``values`` and with those arguments of ``given`` that match its parameters."""
    known = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
    return function(*values, **{name: value for name, value in given.items() if takes_all or name in known})


def get_optimizer_param_scheduler(optimizer: Any) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay of ``get_args()``, counted in sequences."""
    args = get_args()
    unit, factor = ("samples", 1) if args.train_samples else ("iters", args.global_batch_size)
    steps = {name: getattr(args, f"{name}_{unit}") for name in ("train", "lr_decay", "lr_wsd_decay", "lr_warmup")}
    total = (steps["lr_decay"] or steps["train"]) * factor
    fraction = args.lr_warmup_fraction
    start, end = args.start_weight_decay, args.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=steps["lr_warmup"] * factor if fraction is None else int(fraction * total),
        lr_decay_steps=total,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay if start is None else start,
        end_wd=args.weight_decay if end is None else end,
        wd_incr_steps=steps["train"] * factor,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if steps["lr_wsd_decay"] is None else steps["lr_wsd_decay"] * factor,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def setup_model_and_optimizer(
    model_provider_func: Any, model_type: Any = ModelType.encoder_or_decoder, checkpointing_context: Any = None
) -> tuple[list[Any], MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """Build chunks, optimizer and scheduler of ``get_args()``, and load the checkpoint of ``--load``.

    Optimizer and scheduler are None with ``--skip-train``. The first two arguments may be exchanged, because newer
    releases of Megatron-LM pass ``model_type`` first.
    """
    provider = model_provider_func if callable(model_provider_func) else model_type
    args, optimizer, scheduler = get_args(), None, None
    model = get_model(provider, wrap_with_ddp=not args.skip_train)
    if not args.skip_train:
        config, overrides = get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(config, model, overrides or None)
        scheduler = get_optimizer_param_scheduler(optimizer)
    args.iteration, args.num_floating_point_operations_so_far = 0, 0
    if args.load is not None:
        found = load_checkpoint(model, optimizer, scheduler)
        args.iteration, args.num_floating_point_operations_so_far = found
    return model, optimizer, scheduler


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
    forward_backward_func: Callable[..., list[Any]] = forward_backward,
    iteration: int | None = None,
    pg_collection: Any = None,
    p2p_communicator: Any = None,
) -> tuple[dict[str, Tensor], int, bool, bool, int, float, int | None, int]:
    """Take one step through Megatron's public functions, each of which runs a phase of ``training.driver``.

    ``pg_collection`` and ``p2p_communicator`` are passed to ``forward_backward_func``.

    Returns (losses by name on the last stage, 1 if the step was skipped else 0, False, False, 0, gradient norm, number
    of zero gradients or None, 0) as release 0.20 of Megatron-LM does; the constants belong to its rerun machine.
    """
    args = get_args()
    optimizer.zero_grad()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
    )
    taken, norm, zeros = optimizer.step()
    if taken:
        opt_param_scheduler.step(increment=get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
    return _means(reports), int(not taken), False, False, 0, norm, zeros, 0


def _means(reports: Sequence[Mapping[str, Any]], *, by_micro_batch: bool = False) -> dict[str, Tensor]:
    """Average the values of micro-batches by name: pairs (sum, count) over all data-parallel ranks, others locally.

    ``by_micro_batch``: all micro-batches have the same weight, whatever their counts.
    """
    found = {}
    for name in reports[0] if reports else ():
        values = [torch.as_tensor(report[name]).detach().reshape(-1).double() for report in reports]
        if by_micro_batch and len(values[0]) == 2:
            values = [torch.stack([total / count.clamp(min=1), count.new_ones(())]) for total, count in values]
        total = torch.stack(values).sum(0)
        if len(total) == 2:
            all_reduce_(total, parallel_state.get_data_parallel_group(with_context_parallel=True))
        found[name] = total[0] / (total[1] if len(total) == 2 else len(reports))
    return found


@torch.no_grad()
def evaluate(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[Any],
    process_non_loss_data_func: Callable[..., Any] | None,
    config: Any,
    verbose: bool = False,
    non_loss_data_func: Callable[..., Any] | None = None,
    eval_iters: int | None = None,
) -> tuple[dict[str, Tensor], Any, bool]:
    """Evaluate ``eval_iters`` batches; return (losses by name on the last stage, collected data, False).

    The data are collected by ``non_loss_data_func``, or else by the loss functions if ``process_non_loss_data_func`` is
    given.
    """
    # Sizes, and the forward of one batch.
    args, collected = get_args(), None
    eval_iters = args.eval_iters if eval_iters is None else eval_iters
    args.consumed_valid_samples += eval_iters * args.eval_global_batch_size

    def run(**more: Any) -> list[Any]:
        return get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=args.eval_global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
            **more,
        )

    # Evaluate, and collect other data from the model or from one more batch.
    for chunk in model:
        chunk.eval()
    reports = [report for _ in range(eval_iters) for report in run()]
    losses = _means(reports, by_micro_batch=getattr(args, "sft", False))  # as Megatron-LM does
    if non_loss_data_func is not None:
        collected = non_loss_data_func(model)
    elif process_non_loss_data_func is not None:
        collected = run(collect_non_loss_data=True)
    for chunk in model:
        chunk.train()
    return losses, collected, False


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[Any],
    iteration: int,
    process_non_loss_data_func: Callable[..., Any] | None,
    config: Any,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Callable[..., Any] | None = None,
) -> None:
    """Evaluate, and print Megatron-LM's lines on the last rank."""
    given = (forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose, non_loss_data_func)
    losses, collected, _ = evaluate(*given)
    values = {name: float(loss) for name, loss in losses.items()}
    parts = (f"{name} value: {x:.6E} | {name} PPL: {math.exp(min(20.0, x)):.6E} | " for name, x in values.items())
    line = f" validation loss at {prefix} | {''.join(parts)}"
    rule = "-" * (len(line) + 1)
    print_rank_last(f"{rule}\n{line}\n{rule}")
    if process_non_loss_data_func is not None and losses:
        process_non_loss_data_func(collected, iteration, None)


class _Batches:
    """Sample numbers of this data-parallel rank's micro-batches, in order, starting after ``consumed`` samples."""

    def __init__(self, total: int, consumed: int) -> None:
        self.total, self.consumed = total, consumed

    def __iter__(self) -> Iterator[list[int]]:
        size, rank = get_args().micro_batch_size, parallel_state.get_data_parallel_rank()
        together = size * parallel_state.get_data_parallel_world_size()
        for first in range(self.consumed, self.total - together + 1, together):
            yield list(range(first + rank * size, first + (rank + 1) * size))


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    """Return a loader of this data-parallel rank's micro-batches; with --dataloader-type external return ``dataset``.

    Returns None if ``dataset`` is None.
    """
    kind = get_args().dataloader_type
    if dataset is None or kind == "external":
        return dataset
    if kind not in (None, "single"):
        raise ConfigError(
            f"dataloader_type={kind!r} is not supported in programs that build their data sets; use single or external"
        )
    batches: Any = _Batches(len(dataset), consumed_samples)
    return torch.utils.data.DataLoader(dataset, batch_sampler=batches)


def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider: Provider) -> list[Any]:
    """Return iterators of training, validation and test data; None for splits that this rank does not read.

    With several model chunks each is a list with one entry per chunk. The provider receives the numbers of samples of
    the three splits. ``do_train``, ``do_valid`` and ``do_test`` of ``get_args()`` are set to whether any rank of the
    model has data of the split.
    """
    args, chunks = get_args(), parallel_state.get_virtual_pipeline_model_parallel_world_size()
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    on_cpu, found = World.from_environment().device.type == "cpu", []
    for chunk in range(chunks or 1):
        sizes = get_train_valid_test_num_samples()
        datasets = _called(build_train_valid_test_datasets_provider, sizes, vp_stage=chunk if chunks else None)
        loaders = map(build_pretraining_data_loader, datasets, consumed)
        found.append(
            [None if loader is None else host_batches(loader) if on_cpu else iter(loader) for loader in loaders]
        )
    there = torch.tensor([[each is not None for each in row] for row in found], device=World.from_environment().device)
    total = there.sum(0)
    all_reduce_(total, parallel_state.current().group("tp-pp"))
    args.do_train, args.do_valid, args.do_test = (count > 0 for count in total.tolist())
    return found[0] if chunks is None else [list(iterators) for iterators in zip(*found, strict=True)]


def training_log(
    loss_dict: Mapping[str, Any],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    iteration: int,
    loss_scale: Any,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | None,
    params_norm: float | None,
    num_zeros_in_grad: int | None,
    *others: Any,
    **more: Any,
) -> bool:
    """Print Megatron-LM's line of an iteration on the last rank, every ``log_interval``; return ``report_memory_flag``.

    ``total_loss_dict`` has the sums of the losses of taken steps since the last line, whose means are printed. Programs
    of the drop-in have no writer of TensorBoard.
    """
    args = get_args()
    for name, value in loss_dict.items() if not skipped_iter else ():
        total_loss_dict[name] = total_loss_dict.get(name, 0.0) + value
    total_loss_dict["steps"] = total_loss_dict.get("steps", 0) + (not skipped_iter)
    if iteration % args.log_interval and iteration not in (1, args.train_iters):
        return report_memory_flag
    steps = max(1, total_loss_dict.pop("steps"))
    parts = {
        "consumed samples": f"{args.consumed_train_samples:12d}",
        "learning rate": None if learning_rate is None else f"{learning_rate:.6E}",
        "global batch size": f"{get_current_global_batch_size():5d}",
        **{name: f"{float(value) / steps:.6E}" for name, value in total_loss_dict.items()},
        "loss scale": None if loss_scale is None else f"{float(loss_scale):.1f}",
        "grad norm": None if grad_norm is None else f"{grad_norm:.3f}",
        "num zeros": None if num_zeros_in_grad is None else f"{num_zeros_in_grad}",
        "params norm": None if params_norm is None else f"{params_norm:.3f}",
        "number of skipped iterations": f"{skipped_iter:3d}",
    }
    texts = "".join(f" {name}: {text} |" for name, text in parts.items() if text is not None)
    print_rank_last(f" iteration {iteration:8d}/{args.train_iters:8d} |{texts}")
    total_loss_dict.clear()
    return report_memory_flag


def train(
    forward_step_func: Callable[..., Any],
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    config: Any = None,
) -> int:
    """Train up to ``train_iters`` or ``exit_interval``; evaluate, save and log at the intervals of ``get_args()``.

    Returns the last iteration.
    """
    # Connect the optimizer and the data-parallel wrappers with the schedule.
    args = get_args()
    config = config or get_model_config(model[0])
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in model]
    total = args.train_iters
    while args.iteration < total:
        # Take the step.
        update_num_microbatches(args.consumed_train_samples)
        step = train_step(forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config)
        size = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        args.iteration, args.consumed_train_samples = args.iteration + 1, args.consumed_train_samples + size
        # Log, evaluate, save or stop if due.
        if args.iteration % args.log_interval == 0 or args.iteration in (1, total):
            rate = optimizer.param_groups[0]["lr"]
            training_log(step[0], {}, rate, args.iteration, None, False, step[1], step[5], None, None)
        if args.eval_interval and args.iteration % args.eval_interval == 0 and args.do_valid:
            given = (valid_data_iterator, model, args.iteration, process_non_loss_data_func, config)
            evaluate_and_print_results(f"iteration {args.iteration}", forward_step_func, *given)
        leaves = bool(args.exit_interval and args.iteration % args.exit_interval == 0)
        due = args.save_interval and args.iteration % args.save_interval == 0
        if args.save is not None and (due or leaves or args.iteration == total):
            save_checkpoint(args.iteration, model, optimizer, opt_param_scheduler, 0)
        if leaves:
            break
    return int(args.iteration)
