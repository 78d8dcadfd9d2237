"""The command megatron-doctor from a clone: megatron_core/commands/doctor.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("doctor")
