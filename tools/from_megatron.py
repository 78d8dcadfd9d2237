"""The command megatron-from-megatron from a clone: megatron_core/commands/from_megatron.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("from_megatron")
