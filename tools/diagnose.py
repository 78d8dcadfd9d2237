"""The command megatron-diagnose from a clone: megatron_core/commands/diagnose.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("diagnose")
