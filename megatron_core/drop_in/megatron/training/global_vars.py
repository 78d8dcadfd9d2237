"""The arguments, the tokenizer and the timers of the process."""

from argparse import Namespace
from typing import Any

from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.timers import Timers
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as tokenizer_of_args
from megatron_core.errors import ConfigError

_KEPT: dict[str, Any] = {}


def _get(name: str) -> Any:
    if name not in _KEPT:
        raise ConfigError(f"{name} is not initialized; call set_global_variables or initialize_megatron first")
    return _KEPT[name]


def get_args() -> Namespace:
    """Return the arguments of ``set_args``."""
    return _get("args")


def stored_args() -> Namespace | None:
    """Return the arguments of ``set_args``, or None."""
    return _KEPT.get("args")


def get_tokenizer() -> Any:
    """Return the tokenizer of the arguments."""
    return _get("tokenizer")


def get_timers() -> Timers:
    """Return the timers of the process."""
    return _get("timers")


def set_args(args: Namespace) -> None:
    """Store ``args`` for ``get_args``."""
    _KEPT["args"] = args


def of_one_rank(args: Namespace) -> Namespace:
    """Return ``args`` without tensor parallelism, so that every layout pads the vocabulary to the same size."""
    return Namespace(**vars(args) | {"tensor_model_parallel_size": 1})


def set_global_variables(args: Namespace, build_tokenizer: bool = True) -> None:
    """Store ``args``; create the calculator of micro-batches, the timers and optionally the tokenizer."""
    set_args(args)
    sizes = (args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    schedule = " ".join(args.step_batch_size_schedule or ()) or None
    init_num_microbatches_calculator(*sizes, step_batch_size_schedule=schedule, seq_length=args.seq_length)
    if build_tokenizer and args.tokenizer_type is not None:
        alone = of_one_rank(args)
        _KEPT["tokenizer"], args.padded_vocab_size = tokenizer_of_args(alone), alone.padded_vocab_size
    _KEPT["timers"] = Timers(getattr(args, "timing_log_level", 0), getattr(args, "timing_log_option", "minmax"))


def destroy_global_vars() -> None:
    """Remove all of these objects."""
    _KEPT.clear()
    destroy_num_microbatches_calculator()


unset_global_variables = destroy_global_vars


def _build_tokenizer(args: Any) -> Any:
    """Build the tokenizer of ``args`` for ``get_tokenizer``."""
    _KEPT["tokenizer"] = tokenizer_of_args(args)
    return _KEPT["tokenizer"]
