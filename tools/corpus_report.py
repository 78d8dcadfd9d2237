"""The command megatron-corpus-report from a clone: megatron_core/commands/corpus_report.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("corpus_report")
