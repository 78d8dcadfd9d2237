"""One rank of the command ``deepspeed``: run the program with ``--local_rank``."""

import os
import runpy
import sys


def main() -> None:
    """Run the program, or with -m the module, that is the first argument."""
    is_module = sys.argv[1] == "-m"
    program, *arguments = sys.argv[1 + is_module :]
    sys.argv = [program, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
