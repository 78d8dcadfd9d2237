"""Train a GPT: parse the flags, validate them, set up, train; --dry-run prints what a rank of any world would hold.

    python pretrain_gpt.py --help
    python pretrain_gpt.py --nproc-per-node 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...

The same as the command megatron-train, which is megatron_core/commands/train.py.
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("train")
