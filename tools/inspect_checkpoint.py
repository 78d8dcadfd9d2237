"""The command megatron-inspect-checkpoint from a clone: megatron_core/commands/inspect_checkpoint.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("inspect_checkpoint")
