"""The command megatron-plan from a clone: megatron_core/commands/plan_layout.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("plan_layout")
