"""``python -m megatron_core.drop_in PROGRAM ARGS``: run a program written for Megatron-LM or DeepSpeed."""

import atexit
import importlib.util
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import NoReturn

from megatron_core.drop_in import FOLDER, report_other_copies
from megatron_core.errors import LayoutError
from megatron_core.launcher import read_integer, read_launcher

USAGE = """usage: python -m megatron_core.drop_in [--cpu] PROGRAM [ARGS ...]
       python -m megatron_core.drop_in [--cpu] -m MODULE [ARGS ...]
       python -m megatron_core.drop_in --check PATH
       python -m megatron_core.drop_in --path

Run a Python program whose imports of megatron.core, megatron.training and deepspeed find this package's modules.
Under torchrun: torchrun --nproc-per-node N -m megatron_core.drop_in PROGRAM [ARGS ...]
--cpu runs a program that asks for GPUs on the CPU: cuda() and device="cuda" leave tensors there, and nccl is gloo.
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
    on_cpu = arguments[0] == "--cpu"
    arguments = arguments[on_cpu:] or [""]
    is_module = arguments[0] == "-m"
    target, *rest = arguments[is_module:] or [""]
    if not target or (not is_module and not Path(target).is_file()):
        sys.exit(f"error: no program {target!r}; give the path of a Python file, or -m MODULE")
    # As the interpreter does: the folder of a program takes the place of the current one.
    sys.path[1] = os.getcwd() if is_module else str(Path(target).resolve().parent)
    root = str(FOLDER.parents[1])
    if root not in sys.path:
        sys.path.append(root)
    report_other_copies()
    sys.argv = [target, *rest]
    size = _number_of_ranks()
    if on_cpu:
        _emulate_cuda()
    if is_module:
        _check_module(target)
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
    if size > 1:
        _exit_without_destructors()


def _number_of_ranks() -> int:
    """Read the variables of the launcher; exit with one sentence if they are not numbers."""
    try:
        read_launcher()
        for name in ("RANK", "LOCAL_RANK"):
            read_integer(name, 0)
        return read_integer("WORLD_SIZE", 1, least=1)
    except LayoutError as error:
        sys.exit(f"error: {error}")


def _check_module(target: str) -> None:
    """Exit with one sentence if there is no module or package ``target`` that can be run."""
    spec = None
    try:
        if "" not in target.split("."):  # a relative name
            spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target}.".startswith(f"{error.name}."):
            raise  # an import inside of a package around it
        spec = None
    except ValueError:  # __main__ itself
        spec = None
    if spec is None:
        sys.exit(
            f"error: no module {target!r} that can be run; give the name of a module on PYTHONPATH or in the current "
            "folder (a package needs __main__.py)"
        )


def _check(arguments: list[str]) -> None:
    """Print the report of ``program_imports``."""
    if len(arguments) != 1 or not Path(arguments[0]).exists():
        sys.exit(f"error: --check {' '.join(arguments)}: give one existing file or folder")
    from megatron_core.drop_in.program_imports import report

    print(report(Path(arguments[0])))


def _emulate_cuda() -> None:
    """Hide GPUs and let requests for them resolve to the CPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch is imported
    from megatron_core.drop_in.cpu_mode import emulate_cuda

    emulate_cuda()


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
