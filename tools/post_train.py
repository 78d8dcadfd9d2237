"""The command megatron-post-train from a clone: megatron_core/commands/post_train.py."""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("post_train")
