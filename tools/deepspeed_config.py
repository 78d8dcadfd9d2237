"""The command megatron-deepspeed-config from a clone: megatron_core/commands/deepspeed_config.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("deepspeed_config")
