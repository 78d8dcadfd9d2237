"""What a run says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Console, metrics files and TensorBoard."""

    log_interval: int = 10
    """Steps between console lines."""
    metrics_file: str | None = None
    """JSON Lines file of metrics, a line a step; default metrics.jsonl in the --save folder."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    progress: bool = True
    """Show a progress bar when standard error is a terminal; --no-progress shows none."""
