"""The command megatron-preprocess from a clone: megatron_core/commands/preprocess_data.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("preprocess_data")
