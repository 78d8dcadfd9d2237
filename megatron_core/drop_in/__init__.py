"""Run programs written for Megatron-LM unchanged.

Importing this package puts its folder first on ``sys.path``, so that ``from megatron.core import ...`` and
``from megatron.training import ...`` find the modules below ``drop_in/megatron``, which are adapters over the engine.
Import it before the first import of ``megatron``, or start the program with ``python -m megatron_core.drop_in``.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""The folder for ``PYTHONPATH``: it holds the package ``megatron``."""


def activate() -> None:
    """Put ``FOLDER`` first on ``sys.path``.

    Raises ImportError if another ``megatron.core`` is already imported: its classes would be mixed with ours.
    """
    loaded = getattr(sys.modules.get("megatron.core"), "__file__", None)
    if loaded and FOLDER not in Path(loaded).resolve().parents:
        raise ImportError(f"megatron.core is already imported from {loaded}; import megatron_core.drop_in before it")
    sys.path[:] = [str(FOLDER), *(entry for entry in sys.path if entry != str(FOLDER))]


def report_other_copies() -> None:
    """Print one line, on rank 0, if ``sys.path`` has another copy of ``megatron.core``."""
    others = [found for entry in sys.path[1:] if (found := Path(entry, "megatron", "core")).is_dir()]
    if others and os.environ.get("RANK", "0") == "0":
        print(f"megatron_core.drop_in: using {FOLDER / 'megatron' / 'core'}, not {others[0]}", file=sys.stderr)


activate()
if sys.argv[:1] != ["-m"]:  # the interpreter's value while it starts ``__main__``, which reports later
    report_other_copies()
