"""Sizes of data sets, and configurations from parsed arguments."""

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.training.global_vars import get_args
from megatron.training.run_config import run_config_of
from megatron.training.utils.common_utils import print_rank_0, print_rank_last, unwrap_model
from megatron_core import parallel_state
from megatron_core.config.flops import forward_flops_per_token
from megatron_core.parallel.collectives import all_reduce_


def num_floating_point_operations(
    args: Namespace,
    batch_size: int,
    total_real_tokens_in_batch: int | None = None,
    seqlen_squared_sum_in_batch: int | None = None,
) -> int:
    """Return the forward and backward FLOPs of ``batch_size`` sequences.

    A token attends to half of the keys, as in newer releases of Megatron-LM; ``config.flops`` counts all keys.
    ``total_real_tokens_in_batch`` is the number of counted tokens and ``seqlen_squared_sum_in_batch`` the sum of the
    squared lengths of separate documents; by default whole sequences of ``args.seq_length``.
    """
    given = {name: value for name, value in vars(args).items() if value is not None and not name.startswith("window_")}
    model = run_config_of(Namespace(**given)).model
    one, two = (sum(forward_flops_per_token(model, n, args.padded_vocab_size).values()) for n in (1, 2))
    attention, others = two - one, 2 * one - two  # of a query and a key, and of a token
    tokens = batch_size * args.seq_length if total_real_tokens_in_batch is None else total_real_tokens_in_batch
    pairs = batch_size * args.seq_length**2 if seqlen_squared_sum_in_batch is None else seqlen_squared_sum_in_batch
    # Forward and backward of each product of a query and a key; the mask excludes half of the pairs.
    return 3 * tokens * others + 3 * attention * pairs // 2


@dataclass
class SequenceLengths:
    """The number of tokens and the sum of squared lengths of the documents since the last ``consume``."""

    total: Tensor | None = None

    def add(self, cu_seqlens: Tensor | None) -> None:
        """Add documents with these borders; None adds nothing."""
        if cu_seqlens is None or cu_seqlens.numel() < 2:
            return
        lengths = cu_seqlens.flatten().diff().to(torch.float64)
        found = torch.stack([lengths.sum(), lengths.square().sum()])
        self.total = found if self.total is None else self.total + found

    def consume(self) -> tuple[int | None, int | None]:
        """Return both sums over all data-parallel ranks and reset them; (None, None) without documents."""
        total, self.total = self.total, None
        if total is None:
            return None, None
        if parallel_state.model_parallel_is_initialized():
            all_reduce_(total, parallel_state.get_data_parallel_group())
        tokens, squares = (int(value) for value in total.tolist())
        return tokens, squares


_LENGTHS = SequenceLengths()
update_seqlen_stats_from_cu_seqlens = _LENGTHS.add
consume_seqlen_stats_in_iteration = _LENGTHS.consume


def get_train_valid_test_num_samples() -> tuple[int, int, int]:
    """Return the numbers of sequences of each split that the run of ``get_args()`` reads."""
    args = get_args()
    train = args.train_samples or args.train_iters * args.global_batch_size
    size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    steps = args.train_iters or args.train_samples // args.global_batch_size
    times = 1 if args.skip_train else (steps // args.eval_interval if args.eval_interval else 0) + 1
    return train, times * args.eval_iters * size, args.eval_iters * size


def get_megatron_optimizer_config(args: Namespace) -> tuple[OptimizerConfig, dict[Any, Any]]:
    """Return the settings of the optimizer in ``args``, and no overrides."""
    given = settings_of(OptimizerConfig, args)
    if getattr(args, "fp8_format", None) is None:
        given.pop("fp8_recipe", None)  # in Megatron-LM its default does not depend on fp8
    given |= {name: _DTYPES[value] for name, value in given.items() if name.endswith("_dtype") and value in _DTYPES}
    return OptimizerConfig(**given), {}


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def get_megatron_ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Return the settings of data parallelism in ``args``."""
    renamed = {
        "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
        "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
        "bucket_size": "ddp_bucket_size",
        "num_buckets": "ddp_num_buckets",
        "average_in_collective": "ddp_average_in_collective",
    }
    given = {name: getattr(args, flag) for name, flag in renamed.items() if hasattr(args, flag)}
    return DistributedDataParallelConfig(**settings_of(DistributedDataParallelConfig, args) | given)


def settings_of(kind: Any, args: Namespace) -> dict[str, Any]:
    """Return the attributes for the fields of a dataclass, by their names or the engine's, unless they are None."""
    found = {}
    for each in fields(kind):
        value = getattr(args, each.metadata.get("setting", each.name), getattr(args, each.name, None))
        if each.init and value is not None:
            found[each.name] = value
    return found
