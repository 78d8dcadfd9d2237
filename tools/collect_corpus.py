"""The command megatron-collect-corpus from a clone: megatron_core/commands/collect_corpus.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("collect_corpus")
