"""The command megatron-merge-datasets from a clone: megatron_core/commands/merge_datasets.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("merge_datasets")
