"""The command megatron-show-schedule from a clone: megatron_core/commands/show_schedule.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("show_schedule")
