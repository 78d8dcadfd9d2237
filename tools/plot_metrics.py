"""The command megatron-plot-metrics from a clone: megatron_core/commands/plot_metrics.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("plot_metrics")
