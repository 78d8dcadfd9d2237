"""``python -m megatron_core.drop_in PROGRAM ARGS``: run a program written for Megatron-LM or DeepSpeed."""

import atexit
import importlib.util
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import NoReturn

from megatron_core.drop_in import FOLDER, activate, report_other_copies
from megatron_core.drop_in.cpu_start import DEVICES, emulate_cuda_if_requested
from megatron_core.errors import LayoutError
from megatron_core.launcher import check_environment, read_launcher

USAGE = """usage: python -m megatron_core.drop_in [--cpu[=N]] PROGRAM [ARGS ...]
       python -m megatron_core.drop_in [--cpu[=N]] -m MODULE [ARGS ...]
       python -m megatron_core.drop_in --check PATH
       python -m megatron_core.drop_in --path

Run a Python program whose imports of megatron.core, megatron.training and deepspeed find this package's modules.
So do the programs that it starts with sys.executable, torchrun or torch.multiprocessing.spawn.
Under torchrun: torchrun --nproc-per-node N -m megatron_core.drop_in PROGRAM [ARGS ...]
--cpu runs a program that asks for GPUs on the CPU: cuda() and device="cuda" leave tensors there, and nccl is gloo.
N is the number of GPUs that the program sees; without it, that of the ranks of this machine.
--check lists the names of megatron that a file or the files of a folder import and that are missing or unsupported.
--path prints the folder to put on PYTHONPATH instead."""


def main(arguments: list[str]) -> None:
    """Run the program named by ``arguments`` as ``__main__``."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    if arguments == ["--path"]:
        print(FOLDER)
        return
    if arguments[0] == "--check":
        _check(arguments[1:])
        return
    devices, arguments = _split_cpu_flag(arguments)
    is_module = arguments[0] == "-m"
    target, *rest = arguments[is_module:] or [""]
    if not target or (not is_module and not Path(target).is_file()):
        sys.exit(f"error: no program {target!r}; give the path of a Python file, or -m MODULE")
    activate()  # again: in a child, the interpreter has added an entry of its own since
    # As the interpreter does: the folder of a program takes the place of the current one.
    sys.path[1] = os.getcwd() if is_module else str(Path(target).resolve().parent)
    root = str(FOLDER.parents[1])
    if root not in sys.path:
        sys.path.append(root)
    report_other_copies()
    sys.argv = [target, *rest]
    read_launcher()
    try:
        check_environment()
    except LayoutError as error:
        sys.exit(f"error: {error}")
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch is imported
        os.environ[DEVICES] = devices
        emulate_cuda_if_requested()
    if is_module:
        _check_module(target)
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _exit_without_destructors()


def _split_cpu_flag(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the number of devices of ``--cpu`` (empty without a number, None without the flag), and the arguments
    after it."""
    flag, _, count = arguments[0].partition("=")
    if flag != "--cpu":
        return None, arguments
    if arguments[0] != flag and not (count.isascii() and count.isdigit() and 0 < int(count[:20]) < 10_000):
        sys.exit(f"error: {arguments[0]}: the number of devices must be an integer from 1 to 9999")
    return count, arguments[1:] or [""]


def _check_module(name: str) -> None:
    """Exit with one line if ``-m name`` names no module or no package with a ``__main__``."""
    try:
        spec = importlib.util.find_spec(name) if all(name.split(".")) else None  # relative names: "..", ".a"
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above the module lacks something else
        spec = None
    if spec is None:
        sys.exit(f"error: no module {name!r} to run; give -m the name of a module that python -m would find")


def _check(arguments: list[str]) -> None:
    """Print the report of ``program_imports``."""
    if len(arguments) != 1 or not Path(arguments[0]).exists():
        sys.exit(f"error: --check {' '.join(arguments)}: give one existing file or folder")
    from megatron_core.drop_in.program_imports import report

    print(report(Path(arguments[0])))


def _exit_without_destructors() -> NoReturn:
    """Exit as the interpreter does, but skip C++ destructors: a thread of gloo may still be running, and they would
    abort a program that has completed."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins the program's threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
