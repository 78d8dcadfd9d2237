"""The command megatron-verify-module from a clone: megatron_core/commands/verify_module.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("verify_module")
