"""Train a GPT: parse the flags, validate them, set up, train; --dry-run prints what a rank of any world would hold.

The steps behind it: megatron_core/config/cli.py (flags), config/validate.py (all problems at once), training/setup.py
(layout, model, optimizer, data), training/loop.py and training/driver.py (the training itself).
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("train")  # the following imports load torch

import os
import sys

from megatron_core.parallel import World, run_job
from megatron_core.reports.dry_run import describe_rank
from megatron_core.training import pretrain, read_settings


def main() -> None:
    """Run the job on this rank and exit."""
    run_job(_job)


def _job(world: World) -> None:
    config, dry = read_settings(os.path.basename(sys.argv[0]))
    if dry.dry_run:
        print(describe_rank(config, dry.world_size or config.parallel.smallest_world_size, dry.rank))
    else:
        pretrain(config, world)
