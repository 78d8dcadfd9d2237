"""What a run says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Console, metrics files, TensorBoard, and checks while training."""

    log_interval: int = 10
    """Steps between console lines."""
    metrics_file: str | None = None
    """JSON Lines file of metrics, a line a step; default metrics.jsonl in the --save folder."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    progress: bool = True
    """Show a progress bar when standard error is a terminal; --no-progress shows none."""
    replica_check_interval: int | None = 100
    """Steps between comparisons of all copies of the weights, which must be equal to the bit; also before the first
    step and after the last. None: never. Megatron-LM: --check-weight-hash-across-dp-replicas-interval."""
    trace_pipeline: str | None = None
    """Folder in which each rank notes when its forwards and backwards of the first 20 steps ran; draw them with
    tools/show_schedule.py --measured. On GPUs these steps are slower: each time is taken once its work is done."""
    poison_buffers: bool = False
    """Fill new and outdated buffers with NaN, so that a read too early shows at once; slow, for debugging."""
