"""The command megatron-generate from a clone: megatron_core/commands/generate_text.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("generate_text")
