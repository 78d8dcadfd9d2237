"""The command megatron-report from a clone: megatron_core/commands/report.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("report")
