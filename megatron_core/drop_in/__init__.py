"""Run programs written for Megatron-LM or DeepSpeed unchanged.

Importing this package lets ``from megatron.core import ...``, ``from megatron.training import ...`` and ``import
deepspeed`` find the modules below ``drop_in/``, which are adapters over the engine, in this process and in every
interpreter that it starts. Import it before the first import of ``megatron`` or ``deepspeed``, or start the program
with ``python -m megatron_core.drop_in``. The folder also has the metadata of packages ``deepspeed`` and
``megatron-core``, by which transformers and accelerate find them.
"""

import os
import sys
from pathlib import Path

from megatron_core.drop_in.accelerate_ranks import adapt_accelerate
from megatron_core.drop_in.precedence import FOLDER, install_finder, own_megatron, remove_finder

PACKAGES = ("megatron.core", "deepspeed")


def activate() -> None:
    """Give ``FOLDER`` precedence over other copies of its packages, here and in interpreters that this process starts.

    Raises ImportError if another copy of ``PACKAGES`` is already imported: its classes would be mixed with ours.
    """
    for name in PACKAGES:
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded and FOLDER not in Path(loaded).resolve().parents:
            raise ImportError(f"{name} is already imported from {loaded}; import megatron_core.drop_in before it")
    sys.path[:] = _with_folder_first(sys.path)
    install_finder()
    adapt_accelerate()
    # A child finds sitecustomize.py in FOLDER, which calls this function before the child's program starts.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(_with_folder_first(inherited.split(os.pathsep) if inherited else []))


def deactivate() -> None:
    """Undo ``activate``, for a process that compares the drop-in with another copy of its packages."""
    remove_finder()
    sys.path[:] = [entry for entry in sys.path if entry != str(FOLDER)]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in inherited if entry != str(FOLDER))


def _with_folder_first(entries: list[str]) -> list[str]:
    return [str(FOLDER), *(entry for entry in entries if entry != str(FOLDER))]


def is_inherited() -> bool:
    """Whether a process that started this one has called ``activate``."""
    return str(FOLDER) in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def report_other_copies() -> None:
    """Print one line for each of ``PACKAGES`` of which ``sys.path`` has another copy, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    program_megatron = own_megatron(*sys.path)
    if program_megatron is not None:
        print(
            f"megatron_core.drop_in: replacing deepspeed alone; {program_megatron} is a megatron of its own",
            file=sys.stderr,
        )
    for name in PACKAGES if program_megatron is None else PACKAGES[1:]:
        inner = Path(*name.split("."))
        others = [Path(entry, inner) for entry in sys.path[1:] if Path(entry, inner).is_dir()]
        if others:
            print(f"megatron_core.drop_in: using {FOLDER / inner}, not {others[0]}", file=sys.stderr)


_has_reported = is_inherited()
activate()
if sys.argv[:1] != ["-m"] and not _has_reported:  # "-m": __main__ reports, after it has found the program's folder
    report_other_copies()
