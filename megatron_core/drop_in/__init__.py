"""Run programs written for Megatron-LM or DeepSpeed unchanged.

Importing this package puts its folder first on ``sys.path``, so that ``from megatron.core import ...``, ``from
megatron.training import ...`` and ``import deepspeed`` find the modules below ``drop_in/``, which are adapters over the
engine. Import it before the first import of ``megatron`` or ``deepspeed``, or start the program with
``python -m megatron_core.drop_in``. The folder also has the metadata of a package ``deepspeed``, by which transformers
and accelerate find it.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""The folder for ``PYTHONPATH``: it holds the packages ``megatron`` and ``deepspeed``."""
PACKAGES = ("megatron.core", "deepspeed")


def activate() -> None:
    """Put ``FOLDER`` first on ``sys.path``.

    Raises ImportError if another copy of ``PACKAGES`` is already imported: its classes would be mixed with ours.
    """
    for name in PACKAGES:
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded and FOLDER not in Path(loaded).resolve().parents:
            raise ImportError(f"{name} is already imported from {loaded}; import megatron_core.drop_in before it")
    sys.path[:] = [str(FOLDER), *(entry for entry in sys.path if entry != str(FOLDER))]


def report_other_copies() -> None:
    """Print one line for each of ``PACKAGES`` of which ``sys.path`` has another copy, on rank 0."""
    for name in PACKAGES:
        inner = Path(*name.split("."))
        others = [found for entry in sys.path[1:] if (found := Path(entry, inner)).is_dir()]
        if others and os.environ.get("RANK", "0") == "0":
            print(f"megatron_core.drop_in: using {FOLDER / inner}, not {others[0]}", file=sys.stderr)


activate()
if sys.argv[:1] != ["-m"]:  # the interpreter's value while it starts ``__main__``, which reports later
    report_other_copies()
