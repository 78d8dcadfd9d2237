"""Imported by every interpreter whose ``PYTHONPATH`` has this folder, before its program: the drop-in of a child.

``megatron_core.drop_in.activate`` puts the folder there for the interpreters that a program starts: workers of
``torch.multiprocessing.spawn``, of torchrun, or of ``subprocess``.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def start_drop_in() -> None:
    """Activate the drop-in, with ``--cpu`` if the process that started this one has it."""
    root = str(FOLDER.parents[1])
    if root not in sys.path:  # a clone that is not installed
        sys.path.append(root)
    from megatron_core.drop_in import activate
    from megatron_core.drop_in.cpu_start import emulate_cuda_if_requested

    activate()
    emulate_cuda_if_requested()


def run_hidden_module() -> None:
    """Run the ``sitecustomize`` of the installation, which this file hides."""
    others = [entry for entry in sys.path if Path(entry).resolve() != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


start_drop_in()
run_hidden_module()
