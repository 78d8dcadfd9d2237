"""Every public name of ``torch.cuda`` and ``torch.accelerator`` with ``--cpu``: classes are classes, calls do not fail.

The names are those of the installed torch, so that a new one without a counterpart is found here.
"""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

import pytest

from tests.drop_in.test_cpu_mode import run

MODULES = (
    *("torch.cuda", "torch.cuda.comm", "torch.cuda.gds", "torch.cuda.graphs", "torch.cuda.green_contexts"),
    *("torch.cuda.memory", "torch.cuda.nccl", "torch.cuda.nvtx", "torch.cuda.profiler", "torch.cuda.random"),
    *("torch.cuda.sparse", "torch.cuda.streams", "torch.cuda.tunable", "torch.accelerator"),
)
ARGUMENTS = {
    "torch.cuda.set_rng_state": "(torch.get_rng_state(),)",
    "torch.cuda.random.set_rng_state": "(torch.get_rng_state(),)",
    "torch.cuda.set_rng_state_all": "(torch.cuda.get_rng_state_all(),)",
    "torch.cuda.random.set_rng_state_all": "(torch.cuda.get_rng_state_all(),)",
    "torch.cuda.manual_seed": "(3,)",
    "torch.cuda.manual_seed_all": "(3,)",
    "torch.cuda.random.manual_seed": "(3,)",
    "torch.cuda.random.manual_seed_all": "(3,)",
    "torch.cuda.stream": "(torch.cuda.Stream(),)",
    "torch.cuda.StreamContext": "(torch.cuda.Stream(),)",
    "torch.cuda.ExternalStream": "(0,)",
    "torch.cuda.streams.ExternalStream": "(0,)",
    "torch.cuda.get_stream_from_external": "(0,)",
    "torch.cuda.device": "(0,)",
    "torch.cuda.device_of": "(torch.ones(1),)",
    "torch.accelerator.device_index": "(0,)",
    "torch.cuda.nccl.is_available": "([],)",
    "torch.cuda.nvtx.range": "('a',)",
    "torch.cuda.set_stream": "(torch.cuda.Stream(),)",
    "torch.accelerator.set_stream": "(torch.cuda.Stream(),)",
}
"""Arguments of calls that need some, other than those that refuse every call."""
NOT_OF_A_DEVICE = {
    *("torch.cuda.AcceleratorError", "torch.cuda.OutOfMemoryError", "torch.cuda.DeferredCudaCallError"),
    *("torch.cuda.cudaStatus", "torch.accelerator.Graph", "torch.cuda.caching_allocator_disabled"),
}
"""Exceptions, numbers, and classes that need no device to be constructed."""

PROGRAM = """
import importlib, inspect, json, warnings

import torch

warnings.simplefilter("ignore")
ARGUMENTS = {arguments}

def outcome(path, value):
    try:
        value(*eval(ARGUMENTS.get(path, "()")))
    except NotImplementedError as error:
        return "refused" if "--cpu" in str(error) else repr(error)
    except Exception as error:
        return repr(error)
    return "works"

def subclass(value):
    try:
        return issubclass(type("Own", (value,), {{}}), value)
    except TypeError as error:
        return "not an acceptable base type" not in str(error) and str(error) or "final"

found = {{}}
for module, name in {names}:
    value = getattr(importlib.import_module(module), name)
    path = f"{{module}}.{{name}}"
    row = {{"is_class": inspect.isclass(value)}}
    if inspect.isclass(value):
        row["subclass"] = subclass(value)
        row["instance"] = isinstance(object(), value)
    if path not in {skipped}:
        row["call"] = outcome(path, value)
    found[path] = row
print(json.dumps(found))
"""


def _public_names() -> list[tuple[str, str]]:
    names = []
    for path in MODULES:
        module = importlib.import_module(path)
        listed = [name for name in getattr(module, "__all__", vars(module)) if not name.startswith("_")]
        for name in listed:
            value = getattr(module, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                home = getattr(value, "__module__", "") or ""
                if hasattr(module, "__all__") or home.startswith("torch.cuda"):
                    names.append((path, name))
    return names


NAMES = _public_names()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    text = PROGRAM.format(arguments=ARGUMENTS, names=NAMES, skipped=NOT_OF_A_DEVICE)
    (line,) = run(text, tmp_path_factory.mktemp("names"))
    rows: dict[str, dict[str, Any]] = json.loads(line)
    return rows


def test_names_are_those_of_torch() -> None:
    assert len(NAMES) > 200
    assert {("torch.cuda", "CUDAGraph"), ("torch.cuda", "device"), ("torch.accelerator", "synchronize")} <= set(NAMES)


def test_a_class_stays_a_class_and_a_function_a_function(found: dict[str, dict[str, Any]]) -> None:
    expected = {
        f"{module}.{name}": inspect.isclass(getattr(importlib.import_module(module), name)) for module, name in NAMES
    }
    assert {path: row["is_class"] for path, row in found.items()} == expected


def test_classes_can_be_subclassed_and_asked_for(found: dict[str, dict[str, Any]]) -> None:
    classes = {path: row for path, row in found.items() if row["is_class"]}
    final = {path for path, row in classes.items() if row["subclass"] == "final"}
    assert {path: row for path, row in classes.items() if row["subclass"] not in (True, "final")} == {}
    assert {path: row for path, row in classes.items() if row["instance"]} == {}
    for path in final:  # torch's own classes of tensors
        module, _, name = path.rpartition(".")
        with pytest.raises(TypeError):
            type("Own", (getattr(importlib.import_module(module), name),), {})


def test_every_call_works_or_is_refused_with_the_reason(found: dict[str, dict[str, Any]]) -> None:
    calls = {path: row["call"] for path, row in found.items() if "call" in row}
    assert {path: call for path, call in calls.items() if call not in ("works", "refused")} == {}
    refused = {path for path, call in calls.items() if call == "refused"}
    assert {"torch.cuda.CUDAGraph", "torch.cuda.graph", "torch.cuda.MemPool", "torch.cuda.comm.gather"} <= refused
    assert not {"torch.cuda.Stream", "torch.cuda.synchronize", "torch.accelerator.synchronize"} & refused
