"""The command megatron-first-hour from a clone: megatron_core/commands/first_hour.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("first_hour")
