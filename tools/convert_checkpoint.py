"""The command megatron-convert from a clone: megatron_core/commands/convert_checkpoint.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("convert_checkpoint")
