"""The command megatron-inspect-dataset from a clone: megatron_core/commands/inspect_dataset.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("inspect_dataset")
