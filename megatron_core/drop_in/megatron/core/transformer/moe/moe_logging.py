"""Losses of the layers of experts, summed over micro-batches for logging; ``GPTModel`` records its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_reduce_


@dataclass
class MetricEntry:
    """The values of a loss ``[layers]``, and the groups over which they are summed and averaged."""

    values: Tensor
    reduce_group: Any = None
    avg_group: Any = None
    needs_dp_avg: bool = True


class MoEMetricsTracker:
    """Sums of the losses of each layer since the last ``clear``, by name."""

    def __init__(self) -> None:
        self.metrics: dict[str, MetricEntry] = {}

    def ensure_initialized(self, name: str, num_layers: int, device: torch.device | None = None) -> None:
        """Add the loss ``name`` with zeros, for ranks without layers of experts.

        Sums of a model with another number of layers, which this process has built before, are dropped.
        """
        if name not in self.metrics or len(self.metrics[name].values) != num_layers:
            device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self.metrics[name] = MetricEntry(torch.zeros(num_layers, device=device))

    def record(
        self,
        name: str,
        value: Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: Any = None,
        avg_group: Any = None,
        needs_dp_avg: bool = True,
    ) -> None:
        """Add the loss of a layer, numbered from 1; without a number do nothing."""
        if layer_number is None:
            return
        self.ensure_initialized(name, num_layers, value.device)
        entry = self.metrics[name]
        entry.values[layer_number - 1] += value.detach()
        entry.reduce_group, entry.avg_group, entry.needs_dp_avg = reduce_group, avg_group, needs_dp_avg

    def sync(self, names: Iterable[str] | None = None, pg_collection: Any = None) -> None:
        """Sum over pipeline ranks and ``reduce_group``, and average over ``avg_group`` and data-parallel ranks.

        A collective call: all ranks must have the same names, see ``ensure_initialized``.
        """
        pp = getattr(pg_collection, "pp", None) or parallel_state.get_pipeline_model_parallel_group()
        dp = getattr(pg_collection, "dp", None) or parallel_state.get_data_parallel_group()
        for entry in (self.metrics[name] for name in (self.metrics if names is None else names)):
            averaged = (entry.avg_group, dp if entry.needs_dp_avg else None)
            for group in (pp, entry.reduce_group, *averaged):
                if group is not None:
                    all_reduce_(entry.values, group)
            for group in averaged:
                entry.values.div_(1 if group is None else group.size())

    _sync_metrics = sync

    def report(
        self,
        loss_scale: float,
        iteration: int,
        writer: Any = None,
        wandb_writer: Any = None,
        per_layer_logging: bool = False,
        force_initialize: bool = False,
        track_names: str | Sequence[str] | None = None,
        num_layers: int | None = None,
        num_moe_layers: int | None = None,
        moe_layer_freq: int | Sequence[int] | None = None,
        mtp_num_layers: int | None = None,
        total_loss_dict: dict[str, Tensor] | None = None,
        percentiles: dict[str, list[float]] | None = None,
        pg_collection: Any = None,
    ) -> str:
        """Call ``sync``, write the means over the layers of experts times ``loss_scale``, and ``clear``.

        Losses are added to ``total_loss_dict`` if it is given; the others are returned as text.
        """
        names = [track_names] if isinstance(track_names, str) else list(track_names or self.metrics)
        if percentiles:
            raise ConfigError(f"percentiles={percentiles} is not supported; compute them from metrics[name].values")
        if force_initialize:
            if num_layers is None:
                raise ConfigError("num_layers must be provided when force_initialize=True")
            for name in names:
                self.ensure_initialized(name, num_layers + (mtp_num_layers or 0))
        self.sync(names, pg_collection)
        layers = num_moe_layers
        if layers is None:
            layers = _count(num_layers, moe_layer_freq) + (mtp_num_layers or 0)
        if layers <= 0:
            raise ConfigError("MoE metrics require at least one MoE layer; give num_layers or num_moe_layers")
        found = {name: self.metrics[name].values * loss_scale for name in names}
        means = {name: values.sum() / layers for name, values in found.items()}
        lines = dict(means)
        if per_layer_logging:
            lines |= {f"moe/{name}_layer_{i}": x for name, values in found.items() for i, x in enumerate(values)}
        for name, value in lines.items():
            if writer is not None:
                writer.add_scalar(name, value, iteration)
            if wandb_writer is not None:
                wandb_writer.log({name: value}, iteration)
        self.clear()
        if total_loss_dict is not None:
            for name in [name for name in means if name.endswith("loss")]:
                total_loss_dict[name] = total_loss_dict.get(name, 0.0) + means.pop(name)
        return "".join(f" {name}: {value.item():.6E} |" for name, value in means.items())

    def clear(self) -> None:
        """Set the sums to 0."""
        for entry in self.metrics.values():
            entry.values.zero_()


def _count(num_layers: int | None, moe_layer_freq: int | Sequence[int] | None) -> int:
    """Return the number of layers of experts."""
    if isinstance(moe_layer_freq, int) and num_layers is not None:
        return len(range(0, num_layers, moe_layer_freq))
    return sum(moe_layer_freq) if isinstance(moe_layer_freq, Sequence) else num_layers or 0


_TRACKERS: list[MoEMetricsTracker] = []


def get_moe_metrics_tracker() -> MoEMetricsTracker:
    """Return the tracker of this process."""
    if not _TRACKERS:
        _TRACKERS.append(MoEMetricsTracker())
    return _TRACKERS[0]


def set_moe_metrics_tracker(tracker: MoEMetricsTracker) -> None:
    """Replace the tracker of this process."""
    _TRACKERS[:] = [tracker]


def destroy_moe_metrics_tracker() -> None:
    """Remove the tracker of this process; the next call creates another one."""
    _TRACKERS.clear()
