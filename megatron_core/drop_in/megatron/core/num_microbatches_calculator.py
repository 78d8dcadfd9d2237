"""The number of micro-batches in a step, constant or in steps of the samples used."""

from typing import Any

from megatron_core.errors import ConfigError, LayoutError

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class NumMicroBatchesCalculator:
    """Batch sizes of the current step: ``global_batch_size`` as asked for, and as it runs.

    With ``decrease_batch_size_if_needed`` the batch that runs is the largest multiple of ``micro_batch_size x
    data_parallel_size`` that is not above what was asked for.
    """

    def __init__(
        self, micro_batch_size: int, data_parallel_size: int, decrease_batch_size_if_needed: bool, rank: int
    ) -> None:
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.decrease_batch_size_if_needed, self.rank = decrease_batch_size_if_needed, rank
        self.num_micro_batches = self.current_global_batch_size = self.current_running_global_batch_size = 0

    def get(self) -> int:
        """Micro-batches that each rank runs in a step."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Sequences in a step, as asked for."""
        return self.current_global_batch_size

    def get_micro_batch_size(self) -> int:
        """Sequences in a micro-batch."""
        return self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Sequences in a step, as it runs."""
        return self.current_running_global_batch_size

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Set the sizes for the step after ``consumed_samples`` sequences; LayoutError for one that does not divide."""
        raise NotImplementedError

    def _set(self, batch_size: int, check: bool) -> None:
        unit = self.micro_batch_times_data_parallel_size
        if check and not self.decrease_batch_size_if_needed and batch_size % unit:
            raise LayoutError(
                f"global_batch_size={batch_size} is no multiple of micro_batch_size x data_parallel_size = "
                f"{self.micro_batch_size} x {self.data_parallel_size} = {unit}; choose one that is"
            )
        self.current_global_batch_size = batch_size
        self.num_micro_batches = batch_size // unit
        self.current_running_global_batch_size = (
            self.num_micro_batches * unit if self.decrease_batch_size_if_needed else batch_size
        )


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The same global batch in every step."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        self._set(global_batch_size, check=True)
        if self.num_micro_batches < 1:
            raise LayoutError(f"global_batch_size={global_batch_size} has no whole micro-batch for each rank; raise it")

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Nothing changes."""


class StepBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """A schedule "FROM:SIZE FROM:SIZE ..." with FROM in sequences, or in tokens where ``seq_length`` is given.

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
            raise ConfigError("a step_batch_size_schedule says every size; leave decrease_batch_size_if_needed out")
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        self.schedule = _parse_schedule(schedule, seq_length)
        self.update(0, consistency_check=False)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Take the last entry that begins at or before ``consumed_samples``."""
        reached = [size for start, size in self.schedule if start <= consumed_samples]
        self._set(reached[-1], check=consistency_check)


def _parse_schedule(schedule: str, seq_length: int | None) -> list[tuple[int, int]]:
    entries = []
    for entry in schedule.split():
        start, _, size = entry.partition(":")
        try:
            number = float(start.rstrip("KMBT")) * _UNITS.get(start[-1:], 1)
            entries.append((int(number / (seq_length or 1)), int(size)))
        except ValueError as error:
            raise ConfigError(f"step_batch_size_schedule: {entry!r} is not FROM:SIZE, such as 250B:1536") from error
    if not entries or entries[0][0] != 0 or entries != sorted(entries):
        raise ConfigError(f"step_batch_size_schedule={schedule!r} must begin with 0:SIZE and ascend")
    return entries


def _build_num_microbatches_calculator(
    rank: int,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatchesCalculator:
    sizes = (micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
    if step_batch_size_schedule is not None:
        return StepBatchsizeNumMicroBatchesCalculator(*sizes, step_batch_size_schedule, seq_length)
    if global_batch_size is None:
        raise ConfigError("global_batch_size=None; give it, or a step_batch_size_schedule")
    return ConstantNumMicroBatchesCalculator(global_batch_size, *sizes)


_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
"""Of this process, under Megatron's name, which its users set to None between runs."""


def _current() -> NumMicroBatchesCalculator:
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise ConfigError("no calculator of micro-batches yet; call init_num_microbatches_calculator first")
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def _replace(calculator: NumMicroBatchesCalculator | None) -> None:
    globals()["_GLOBAL_NUM_MICROBATCHES_CALCULATOR"] = calculator


def get_num_microbatches() -> int:
    """Micro-batches that each rank runs in a step."""
    return _current().get()


def get_current_global_batch_size() -> int:
    """Sequences in a step, as asked for."""
    return _current().get_current_global_batch_size()


def get_micro_batch_size() -> int:
    """Sequences in a micro-batch."""
    return _current().get_micro_batch_size()


def get_current_running_global_batch_size() -> int:
    """Sequences in a step, as it runs."""
    return _current().get_current_running_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Set the sizes for the step after ``consumed_samples`` sequences."""
    _current().update(consumed_samples, consistency_check, verbose)


def init_num_microbatches_calculator(*sizes: Any, **settings: Any) -> None:
    """As ``reconfigure_num_microbatches_calculator``; AssertionError if this process has a calculator."""
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        raise ConfigError("there is a calculator of micro-batches already; call destroy_num_microbatches_calculator")
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
    """Make or replace the calculator of this process."""
    if rampup_batch_size is not None:
        raise ConfigError(f"rampup_batch_size={rampup_batch_size} is not supported; give a step_batch_size_schedule")
    if micro_batch_size is None or data_parallel_size is None:
        raise ConfigError("micro_batch_size and data_parallel_size are needed")
    calculator = _build_num_microbatches_calculator(
        rank,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length,
    )
    _replace(calculator)


def destroy_num_microbatches_calculator() -> None:
    """Forget the calculator of this process."""
    _replace(None)


unset_num_microbatches_calculator = destroy_num_microbatches_calculator
