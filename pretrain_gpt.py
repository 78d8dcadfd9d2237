"""Train a GPT: parse the flags, validate them, set up, train.

    python pretrain_gpt.py --help
    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...

The steps behind it: megatron_core/config/cli.py (flags), config/validate.py (all problems at once),
training/setup.py (layout, model, optimizer, data), training/loop.py and training/step.py (the training itself).
"""

from megatron_core.config.cli import parse_run_config
from megatron_core.parallel import World, run_job
from megatron_core.training import pretrain


def main() -> None:
    """Run the job on this rank and exit."""
    world = World.from_environment()
    run_job(world, lambda: pretrain(parse_run_config(prog="pretrain_gpt.py"), world))


if __name__ == "__main__":
    main()
