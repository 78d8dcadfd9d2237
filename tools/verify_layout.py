"""The command megatron-verify from a clone: megatron_core/commands/verify_layout.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("verify_layout")
