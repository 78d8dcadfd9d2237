"""Start ranks on this machine with torchrun, and end with the exit status of the first rank that failed.

torchrun itself ends with status 1 and a traceback of its own, below the message of the rank.

python -m megatron_core.commands.start_ranks NUMBER MODULE FLAGS...
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from megatron_core.commands.start import command_name


def main() -> NoReturn:
    """Run torchrun in this process, without the log lines in which it repeats that ranks have failed."""
    number, module, *flags = sys.argv[1:]
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        run(parse_args(["--standalone", "--nproc-per-node", number, "-m", module, *flags]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        killed = failure.exitcode < 0
        how = f"was killed by {failure.signal_name()}" if killed else f"ended with status {failure.exitcode}"
        print(f"{command_name(module.split('.')[-1])}: rank {rank} {how}", file=sys.stderr)
        sys.exit(128 - failure.exitcode if killed else failure.exitcode)
    except SignalException as error:
        sys.exit(128 + int(signal.Signals(error.sigval)))
    sys.exit(0)


if __name__ == "__main__":
    main()
