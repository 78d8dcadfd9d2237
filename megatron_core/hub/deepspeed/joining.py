"""Whole tensors from the parts of tensor-parallel ranks, by the rules that DeepSpeed stores with its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.deepspeed.shards import Parts, Stored

UNIVERSAL_VERSION = 0.4
"""The newest version of ``universal_checkpoint_info`` that is understood."""
KINDS = {
    "tp_replicated_parameter_patterns": "first",
    "parameter_to_average_patterns": "mean",
    "parameter_with_row_parallelism_patterns": "columns",
    "vocabulary_parameter_patterns": "rows",
    "parameter_with_2_sub_params_cat_dim_0": "halves",
}
"""Lists of patterns of parameter names -> how their parts are joined; other parameters are joined by rows."""
LONGEST, MOST_REPEATS = 300, 4
"""Bounds of a pattern, with which a match takes little time."""
CONVERT = "convert it with DeepSpeed's ds_to_universal, whose result is read"


class Joiner:
    """Joins parts of ``size`` tensor-parallel ranks. Errors: ``CheckpointError`` without rules or for unknown ones."""

    def __init__(self, info: Any, size: int) -> None:
        self.size = size
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        if size == 1:
            return
        if not isinstance(info, Mapping) or not info:
            raise CheckpointError(
                f"the checkpoint has {size} tensor-parallel ranks, but no universal_checkpoint_info, which says how "
                "their parts are joined; save it with DeepSpeed's AutoTP, or gather the weights in the training program"
            )
        if info.get("parameter_with_sub_params"):
            raise CheckpointError(f"the checkpoint has tensor-parallel parameters of several parts; {CONVERT}")
        for name, kind in KINDS.items():
            listed = info.get(name) or []
            if not isinstance(listed, list):
                raise CheckpointError(f"universal_checkpoint_info: {name} must be a list of patterns")
            self._patterns += [(compiled(pattern), kind) for pattern in listed]

    def parts(self, ranks: Sequence[Parts]) -> Parts:
        """Join weights and state of all ranks."""
        first = ranks[0]
        found = Parts(self.tensors([each.main for each in ranks]), {}, set(), first.groups)
        for kind in first.states:
            found.states[kind] = self.tensors([each.states.get(kind, {}) for each in ranks])
        for each in ranks:
            found.steps |= each.steps
        return found

    def tensors(self, ranks: Sequence[Mapping[str, Stored]]) -> dict[str, Stored]:
        """Join tensors by name."""
        if self.size == 1:
            return dict(ranks[0])
        for each in ranks[1:]:
            if each.keys() != ranks[0].keys():
                other = sorted(each.keys() ^ ranks[0].keys())
                raise CheckpointError(f"only some tensor-parallel ranks have {other[0]}: files of two runs are mixed")
        return {name: self._joined(name, [each[name] for each in ranks]) for name in ranks[0]}

    def _joined(self, name: str, parts: Sequence[Stored]) -> Stored:
        kind = next((kind for pattern, kind in self._patterns if pattern.match(name)), "rows")
        if kind in ("first", "mean"):
            if any(part.shape != parts[0].shape for part in parts):
                raise CheckpointError(f"{name} has different shapes on tensor-parallel ranks, but is not split")
            if kind == "first":
                return parts[0]
            return Stored(parts[0].shape, lambda: torch.stack([part.read() for part in parts]).mean(0))
        axis = 1 if kind == "columns" and len(parts[0].shape) > 1 else 0
        if any(not part.shape or _others(part, axis) != _others(parts[0], axis) for part in parts):
            raise CheckpointError(f"{name} has shapes on tensor-parallel ranks that do not fit together")
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return Stored(tuple(shape), _reader(parts, axis, halves=kind == "halves"))


def _others(part: Stored, axis: int) -> tuple[int, ...]:
    return part.shape[:axis] + part.shape[axis + 1 :]


def _reader(parts: Sequence[Stored], axis: int, *, halves: bool) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensors = [part.read() for part in parts]
        if not halves:
            return torch.cat(tensors, axis)
        pairs = [tensor.chunk(2) for tensor in tensors]
        return torch.cat([torch.cat([pair[half] for pair in pairs]) for half in (0, 1)])

    return read


def compiled(pattern: Any) -> re.Pattern[str]:
    """A pattern of a file; those that could take long are refused."""
    text = pattern if isinstance(pattern, str) else ""
    plain = re.sub(r"\\.", "", text)
    if not text or len(text) > LONGEST or set(plain) & set("({") or sum(map(plain.count, "*+?")) > MOST_REPEATS:
        raise CheckpointError(f"universal_checkpoint_info has the pattern {quoted(pattern)}; {CONVERT}")
    try:
        return re.compile(text)
    except re.error:
        raise CheckpointError(f"universal_checkpoint_info has the invalid pattern {text[:60]!r}") from None
