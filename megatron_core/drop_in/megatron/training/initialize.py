"""Arguments, process groups and seeds of the caller's program."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import parse_and_validate_args
from megatron.training.global_vars import get_args, stored_args
from megatron.training.run_config import run_config_of
from megatron_core import parallel_state
from megatron_core.parallel import World, start_world


def initialize_megatron(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Read and check the command line, start torch.distributed, create the process groups, and set the seed.

    After ``parse_and_validate_args()``, a call without arguments uses its result.

    Afterwards ``get_args`` and the other functions of ``global_vars`` work. ``train_iters`` is also set with
    ``--train-samples``.
    """
    parsed = stored_args()
    is_new = getattr(parsed, "waits_for_groups", False)
    if parsed is None or not is_new or extra_args_provider is not None or args_defaults is not None:
        parsed = parse_and_validate_args(extra_args_provider, args_defaults=args_defaults)
    parsed.waits_for_groups = False
    start_groups(parsed)


def _initialize_distributed(get_embedding_ranks: Any = None, *others: Any, **more: Any) -> None:
    """Start torch.distributed and create the process groups of ``get_args()``, for programs that parse themselves.

    Other arguments have no effect: the engine chooses the ranks of embeddings and the store.
    """
    args = get_args()
    start_groups(args)
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()


def start_groups(args: Namespace) -> None:
    """Start torch.distributed unless it has started, create the process groups, and set the seed."""
    args.train_iters = run_config_of(args).training.num_iterations(args.data_parallel_size, args.seq_length)
    if not dist.is_initialized():
        minutes = args.distributed_timeout_minutes
        start_world(World.from_environment(), backend=args.distributed_backend, timeout_minutes=minutes)
    if not dist.is_initialized():  # a single process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        order=args.rank_order,
    )
    _set_random_seed(args.seed)


def _set_random_seed(seed_: int, data_parallel_random_init: bool = False, **others: Any) -> None:
    """Seed initial weights and dropout; ranks never change the seed."""
    model_parallel_cuda_manual_seed(seed_)


def write_args_to_tensorboard(writer: Any = None) -> None:
    """Write every argument as text to TensorBoard, if the program passes its writer."""
    args = get_args()
    if writer is None:
        return
    for name, value in vars(args).items():
        writer.add_text(name, str(value), global_step=args.iteration)
