"""The number of micro-batches in a step, constant or by a schedule of the samples used."""

from collections.abc import Callable
from typing import Any

from megatron_core.config.growth import Steps
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.batch_growth.settings import parse_steps


class NumMicroBatchesCalculator:
    """Batch sizes of the current step: the requested ``global_batch_size`` and the running one.

    They differ with ``decrease_batch_size_if_needed``: the running batch is the largest multiple of ``micro_batch_size
    x data_parallel_size`` that is not above the requested batch.
    """

    schedule: Steps

    def __init__(
        self, micro_batch_size: int, data_parallel_size: int, decrease_batch_size_if_needed: bool, rank: int
    ) -> None:
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.decrease_batch_size_if_needed, self.rank = decrease_batch_size_if_needed, rank
        self.num_micro_batches = self.current_global_batch_size = self.current_running_global_batch_size = 0

    def get(self) -> int:
        """Return the number of micro-batches of each rank in a step."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Return the requested number of sequences in a step."""
        return self.current_global_batch_size

    def get_micro_batch_size(self) -> int:
        """Return the number of sequences in a micro-batch."""
        return self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Return the running number of sequences in a step."""
        return self.current_running_global_batch_size

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Set the sizes for the step after ``consumed_samples`` sequences; LayoutError for a size that does not fit."""
        size, unit = self.schedule.at(consumed_samples), self.micro_batch_times_data_parallel_size
        if consistency_check and not self.decrease_batch_size_if_needed and size % unit:
            raise LayoutError(
                f"global_batch_size={size} is not a multiple of micro_batch_size x data_parallel_size = "
                f"{self.micro_batch_size} x {self.data_parallel_size} = {unit}; choose a multiple"
            )
        self.current_global_batch_size, self.num_micro_batches = size, size // unit
        running = self.num_micro_batches * unit if self.decrease_batch_size_if_needed else size
        self.current_running_global_batch_size = running


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The same global batch in every step."""

    def __init__(self, global_batch_size: int, *sizes: Any, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.schedule = Steps(((0, global_batch_size),))
        self.update(0, consistency_check=True)
        if self.num_micro_batches < 1:
            raise LayoutError(f"global_batch_size={global_batch_size} has no whole micro-batch for each rank; raise it")


class StepBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """A schedule "FROM:SIZE FROM:SIZE ...", with FROM in sequences, or in tokens if ``seq_length`` is given.

    FROM may end with K, M, B or T (10**3 to 10**12).
    """

    def __init__(
        self,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        schedule: str,
        seq_length: int | None = None,
    ) -> None:
        if decrease_batch_size_if_needed:
            raise ConfigError("step_batch_size_schedule excludes decrease_batch_size_if_needed; leave one of them out")
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        entries = [parse_steps((entry,), seq_length or 1) for entry in schedule.split()]
        begins = tuple(pair for entry in entries for pair in entry)
        if not begins or not all(entries) or begins[0][0] != 0 or list(begins) != sorted(begins):
            raise ConfigError(
                f"step_batch_size_schedule={schedule!r} must be FROM:SIZE FROM:SIZE ... in ascending order from 0, "
                "such as '0:768 250B:1536'"
            )
        self.schedule = Steps(begins)
        self.update(0, consistency_check=False)


_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
"""The calculator of this process. Programs set Megatron's variable to None between runs."""


def _current() -> NumMicroBatchesCalculator:
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise ConfigError("there is no calculator of micro-batches; call init_num_microbatches_calculator first")
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def _replace(calculator: NumMicroBatchesCalculator | None) -> None:
    globals()["_GLOBAL_NUM_MICROBATCHES_CALCULATOR"] = calculator


def _getter(name: str) -> Callable[[], int]:
    """Return a function that calls a method of the calculator of this process."""

    def get() -> int:
        return int(getattr(_current(), name)())

    get.__doc__ = getattr(NumMicroBatchesCalculator, name).__doc__
    return get


get_num_microbatches = _getter("get")
get_current_global_batch_size = _getter("get_current_global_batch_size")
get_micro_batch_size = _getter("get_micro_batch_size")
get_current_running_global_batch_size = _getter("get_current_running_global_batch_size")


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Set the sizes for the step after ``consumed_samples`` sequences."""
    _current().update(consumed_samples, consistency_check, verbose)


def init_num_microbatches_calculator(*sizes: Any, **settings: Any) -> None:
    """Call ``reconfigure_num_microbatches_calculator``; AssertionError if this process has a calculator."""
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        raise ConfigError("there is already a calculator of micro-batches; call destroy_num_microbatches_calculator")
    reconfigure_num_microbatches_calculator(*sizes, **settings)


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Any = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Create or replace the calculator of this process."""
    if rampup_batch_size is not None:
        raise ConfigError(f"rampup_batch_size={rampup_batch_size} is not supported; give a step_batch_size_schedule")
    sizes = (global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    _replace(_build_num_microbatches_calculator(rank, *sizes, step_batch_size_schedule, seq_length))


def _build_num_microbatches_calculator(
    rank: int,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    data_parallel_size: int | None,
    decrease_batch_size_if_needed: bool,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatchesCalculator:
    """Return a calculator."""
    if micro_batch_size is None or data_parallel_size is None:
        raise ConfigError(f"{micro_batch_size=} and {data_parallel_size=} must be given")
    sizes = (micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
    if step_batch_size_schedule is not None:
        return StepBatchsizeNumMicroBatchesCalculator(*sizes, step_batch_size_schedule, seq_length)
    if global_batch_size is None:
        raise ConfigError("global_batch_size=None; give it, or a step_batch_size_schedule")
    return ConstantNumMicroBatchesCalculator(global_batch_size, *sizes)


def destroy_num_microbatches_calculator() -> None:
    """Remove the calculator of this process."""
    _replace(None)


unset_num_microbatches_calculator = destroy_num_microbatches_calculator
