"""The universal format: a folder for each parameter, with its weights and state in whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_core.errors import CheckpointError
from megatron_core.hub.deepspeed.folder import ALLOWED, load_dict
from megatron_core.hub.deepspeed.shards import Parts, Shape, Stored, is_plain, steps_of, whole_number
from megatron_core.hub.megatron_lm.pickles import load_tensors

WEIGHT, STATE = "fp32", "optimizer_state.pt"


def read_universal(folder: Path, shapes: Mapping[str, Shape]) -> tuple[Parts, dict[str, Stored], Mapping[str, Any]]:
    """Read all tensors below ``folder``; return trained parameters, others, and the content of ``optimizer_state.pt``.

    ``shapes``: shapes of the trained parameters, for files with flat tensors. Errors: ``CheckpointError``.
    """
    common = load_dict(folder / STATE)
    found = Parts()
    others: dict[str, Stored] = {}
    steps: set[int] = set()
    for name in shapes:
        path = folder / name
        if "/" in name or name in (".", "..") or not (path / f"{WEIGHT}.pt").is_file():
            raise CheckpointError(f"{folder} has no {name[:100]}/{WEIGHT}.pt; copy the whole checkpoint again")
    for path in sorted(folder.iterdir()):
        for file in sorted(path.glob("*.pt")) if path.is_dir() else ():
            content = load_tensors(file, ALLOWED)
            value = content.get("param") if isinstance(content, dict) else content
            if file.stem == "step":
                step = whole_number(value)
                steps |= set() if step is None else {step}
                continue
            stored = _stored(file, value, None if isinstance(content, dict) else shapes.get(path.name))
            weights = found.main if path.name in shapes else others  # others: frozen parameters, buffers, second names
            target = weights if file.stem == WEIGHT else found.states.setdefault(file.stem, {})
            target[path.name] = stored
    inner = common.get("optimizer_state_dict")
    if not steps and isinstance(inner, Mapping) and isinstance(inner.get("state"), Mapping):
        states = [each for each in inner["state"].values() if isinstance(each, Mapping)]
        steps = {step for state in states for step in steps_of(state, None)}
    found.steps = steps
    groups = common.get("param_groups")
    found.groups = [dict(each) for each in groups if isinstance(each, Mapping)] if isinstance(groups, list) else []
    return found, others, common


def _stored(file: Path, value: Any, shape: Shape | None) -> Stored:
    if not isinstance(value, Tensor) or not is_plain(value):
        raise CheckpointError(f"{file} contains a {type(value).__name__}; it must contain a tensor of numbers")
    shape = tuple(value.shape) if shape is None or value.dim() > 1 else shape
    if prod(shape) != value.numel():
        raise CheckpointError(f"{file} has {value.numel()} elements, but the parameter has the shape {list(shape)}")
    tensor = value.detach()
    return Stored(shape, lambda: tensor.float().reshape(shape))
