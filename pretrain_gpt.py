"""Train a GPT: parse the flags, validate them, set up, train.

    python pretrain_gpt.py --help
    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...
"""

import sys

from megatron_core.config.cli import parse_run_config
from megatron_core.errors import MegatronError
from megatron_core.parallel import World
from megatron_core.training import pretrain


def main() -> int:
    """Run the job on this rank and return its exit status."""
    try:
        config = parse_run_config(prog="pretrain_gpt.py")
    except MegatronError as error:
        if World.from_environment().rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return pretrain(config)


if __name__ == "__main__":
    sys.exit(main())
