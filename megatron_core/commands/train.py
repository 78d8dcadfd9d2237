"""Train a GPT: parse the flags, validate them, set up, train; --dry-run prints what a rank of any world would hold.

The steps behind it: megatron_core/config/cli.py (flags), config/validate.py (all problems at once), training/setup.py
(layout, model, optimizer, data), training/loop.py and training/driver.py (the training itself).
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("train")

import os
import sys
from typing import TYPE_CHECKING

from megatron_core.config.cli import CommandLine, parse_command_line, settings_from_folder
from megatron_core.config.validate import check
from megatron_core.errors import MegatronError, visible

if TYPE_CHECKING:
    from megatron_core.parallel import World


def main() -> None:
    """Run the job on this rank and exit."""
    # A process without a launcher answers --help and refuses settings before it loads torch, which takes seconds. The
    # ranks of a job report one error together, for which they need the job.
    parsed = None if "WORLD_SIZE" in os.environ else _usable_command_line()
    from megatron_core.parallel import run_job

    run_job(lambda world: _job(world, parsed))


def _usable_command_line() -> CommandLine:
    try:
        config, dry = parse_command_line(prog=_program())
        if not (dry.dry_run or settings_from_folder(config)):
            check(config, 1)
    except MegatronError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(1)
    return config, dry


def _job(world: "World", parsed: CommandLine | None) -> None:
    from megatron_core.training import pretrain, read_settings

    config, dry = read_settings(_program(), parsed=parsed)
    if dry.dry_run:
        from megatron_core.reports.dry_run import describe_rank

        print(describe_rank(config, dry.world_size or config.parallel.smallest_world_size, dry.rank))
    else:
        pretrain(config, world)


def _program() -> str:
    return os.path.basename(sys.argv[0])
