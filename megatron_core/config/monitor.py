"""Logging and checks during training."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section()
class MonitorConfig:
    """Console, metrics file, and checks during training."""

    log_interval: int = setting(10, r.COUNT, when=ALWAYS)
    """Steps between console lines."""
    log_format: Literal["short", "megatron"] = setting("short", when=ALWAYS)
    """Console lines. short: at most 120 columns, and a table at the end. megatron: Megatron-LM's lines, which have
    all values."""
    quiet: bool = setting(False, when=ALWAYS)
    """Print no lines of steps, no progress bar and no table at the end; evaluations and warnings remain."""
    metrics_file: str | None = setting(None, r.FILE, when=ALWAYS)
    """JSON Lines file of metrics, one line for each step; default: metrics.jsonl in the --save folder."""
    log_params_norm: bool = setting(False, when=ALWAYS)
    """Log the norm of all weights before each step."""
    log_num_zeros_in_grad: bool = setting(False, when=ALWAYS)
    """Log the number of gradient elements that are 0."""
    log_norms_by_layer: bool = setting(False, when=ALWAYS)
    """Log the norms of gradient and weights of the embedding, each layer and the head; reads both once more."""
    progress: bool = setting(True, when=ALWAYS)
    """Show a progress bar if standard error is a terminal; --no-progress: never."""
    replica_check_interval: int | None = setting(
        100, r.COUNT, when=c.SEVERAL_RANKS, aliases="check_weight_hash_across_dp_replicas_interval"
    )
    """Steps between checks that all copies of weights are equal to the bit, which also run before the first and after
    the last step. None: no checks."""
    record_hashes: bool = setting(False, when=ALWAYS)
    """Write losses, gradient norms and hashes of gradients, optimizer state and weights of each step to
    metrics.hashes.jsonl next to the metrics file. The hashes do not depend on the layout; megatron-compare-hashes finds
    the first difference of two runs."""
    record_hashes_interval: int = setting(1, r.COUNT, when=given("record_hashes"))
    """With --record-hashes: steps between records. The end of a run reports their share of the processor time."""
    record_hashes_by_tensor: bool = setting(False, when=given("record_hashes"))
    """With --record-hashes: also write the hash of each tensor, so that a difference can be located."""
    trace_pipeline: str | None = setting(None, r.FOLDER, when=ALWAYS)
    """Folder for the times of each rank's forwards and backwards in the first 20 steps; megatron-show-schedule
    --measured draws them. On GPUs these steps are slower, because each measurement synchronizes."""
    record_times: bool = setting(True, when=ALWAYS)
    """Record the time of each phase of a step and the memory of each rank, in the console line, the metrics and the
    folder metrics.ranks next to the metrics file; --no-record-times turns it off."""
    peak_tflops: float | None = setting(None, r.POSITIVE, when=c.RECORD_TIMES)
    """Peak rate of a rank's matrix products in TFLOP/s, relative to which utilization is reported; default: measured
    for 30 ms at the first start of the run and stored with its records."""
    timing_log_level: Literal[0, 1, 2] = setting(0, needs=c.RECORD_TIMES)
    """Print times of all ranks every --log-interval steps. 0: none. 1: phases of the step. 2: also the waiting time for
    each kind of collective."""
    timing_log_option: Literal["max", "minmax", "all"] = setting("minmax", when=c.TIMING_LOG)
    """Printed times. max: the longest. minmax: the shortest and the longest. all: the times of all ranks."""
    log_straggler: bool = setting(False, needs=c.RECORD_TIMES)
    """Print the slowest and the fastest ranks every --log-interval steps."""
    straggler_minmax_count: int = setting(1, r.COUNT, when=given("log_straggler"))
    """Number of slowest and of fastest ranks that --log-straggler prints."""
    profile: bool = setting(False, needs=c.RECORD_TIMES)
    """Write a Perfetto trace of some steps of all ranks: pipeline actions, collectives and phases."""
    profile_step_start: int = setting(10, when=c.PROFILE)
    """With --profile: last step before the trace."""
    profile_step_end: int = setting(12, when=c.PROFILE)
    """With --profile: the last step of the trace."""
    profile_ranks: tuple[int, ...] = setting((), when=c.PROFILE)
    """With --profile: ranks to trace; default: all."""
    profile_dir: str | None = setting(None, r.FOLDER, when=c.PROFILE)
    """With --profile: folder for the ranks' files and the merged trace.json; default: profile in the --save folder."""
    use_pytorch_profiler: bool = setting(False, when=c.PROFILE)
    """With --profile: add operations and kernels from torch.profiler; these steps are slower."""
    pytorch_profiler_collect_shapes: bool = setting(False, when=(c.PROFILE, c.PYTORCH_PROFILER))
    """With --use-pytorch-profiler: record the shapes of operations' inputs."""
    pytorch_profiler_collect_callstack: bool = setting(False, when=(c.PROFILE, c.PYTORCH_PROFILER))
    """With --use-pytorch-profiler: record the Python call stack of each operation."""
    poison_buffers: bool = setting(False, when=ALWAYS)
    """Fill new and outdated buffers with NaN, so that reading them too early gives NaN; slow, for debugging."""
