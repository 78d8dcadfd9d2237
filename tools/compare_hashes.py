"""The command megatron-compare-hashes from a clone: megatron_core/commands/compare_hashes.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("compare_hashes")
