"""Logging and checks during training."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, section, setting
from megatron_core.feature import Extensible


@dataclass(frozen=True, kw_only=True)
@section()
class MonitorConfig(Extensible):
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
    poison_buffers: bool = setting(False, when=ALWAYS)
    """Fill new and outdated buffers with NaN, so that reading them too early gives NaN; slow, for debugging."""
