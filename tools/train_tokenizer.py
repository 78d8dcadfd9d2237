"""The command megatron-tokenizer from a clone: megatron_core/commands/train_tokenizer.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("train_tokenizer")
