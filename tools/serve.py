"""The command megatron-serve from a clone: megatron_core/commands/serve.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("serve")
