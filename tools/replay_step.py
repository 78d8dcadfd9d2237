"""The command megatron-replay-step from a clone: megatron_core/commands/replay_step.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("replay_step")
