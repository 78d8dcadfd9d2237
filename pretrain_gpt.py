"""Train a GPT: parse the flags, validate them, set up, train; --dry-run prints what a rank of any world would hold.

    python pretrain_gpt.py --help
    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 ...

The steps behind it: megatron_core/config/cli.py (flags), config/validate.py (all problems at once), training/setup.py
(layout, model, optimizer, data), training/loop.py and training/driver.py (the training itself).
"""

from megatron_core.command import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()  # the following imports load torch

from megatron_core.parallel import World, run_job
from megatron_core.training import pretrain, read_settings
from megatron_core.training.dry_run import describe_rank


def main() -> None:
    """Run the job on this rank and exit."""
    run_job(_job)


def _job(world: World) -> None:
    config, dry = read_settings("pretrain_gpt.py")
    if dry.dry_run:
        print(describe_rank(config, dry.world_size or config.parallel.smallest_world_size, dry.rank))
    else:
        pretrain(config, world)


if __name__ == "__main__":
    main()
