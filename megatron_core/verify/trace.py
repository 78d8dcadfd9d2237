"""Traces of a training: quantities that must not depend on the layout."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import numpy as np
import torch

from megatron_core.checkpoint import TensorBox, parameter_pieces, pieces_of
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.parallel.sharding import spec_of

Part = tuple[str, tuple[int, ...], tuple[slice, ...], np.ndarray]
"""Name and shape of a global tensor, the slices of a rank's part, and the part's values in float64."""

_COPIES: WeakValueDictionary[tuple[str, tuple[tuple[int, int], ...]], np.ndarray] = WeakValueDictionary()
"""By tensor and slices the values of a rank of this process, which ranks with equal values share."""


@dataclass
class RankTrace:
    """One rank's losses and gradient norms by step, and its parts of the global tensors.

    Tensors are named ``grad0.NAME`` (reduced gradients of the first step before clipping), ``grad1.NAME``, ... and
    ``weight.NAME`` (after the last step); ``report0.NAME`` are numbers reported by a step. A thorough trace also has
    ``evaluation.NAME``, and the optimizer's state after the last step, such as ``exp_avg.NAME``.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    pieces: list[Part] = field(default_factory=list)
    owner: str = ""
    """Whose tensors are added, with outer groups: ``group 1`` or ``all groups``; names then end with it."""

    def add_gradients(self, data_parallel: DataParallel, step: int, scale: float = 1.0) -> None:
        """Copy this rank's shards of the final gradients of ``step`` (from 0), divided by the loss scale."""
        for bucket in data_parallel.buckets:
            self._add(f"grad{step}", _gradient_pieces(bucket, scale))

    def add_weights(self, data_parallel: DataParallel, modules: Iterable[torch.nn.Module]) -> None:
        """Copy the weights of this rank's stages."""
        for module in modules:
            named = getattr(module, "named_global_parameters", module.named_parameters)
            pairs = list(named())
            for (name, _), parameter in zip(pairs, data_parallel.reading([p for _, p in pairs]), strict=True):
                self._add("weight", parameter_pieces([(name, parameter)]))

    def add_global(self, named: Iterable[tuple[str, torch.nn.Parameter, int, int, torch.Tensor]]) -> None:
        """Copy this rank's parts of the global weights of outer groups: name, parameter, first element, end, values."""
        self.owner = "all groups"
        for name, parameter, start, stop, flat in named:
            self._add("weight", pieces_of(name, spec_of(parameter), tuple(parameter.shape), start, stop, flat))

    def add_reports(self, step: int, reports: Mapping[str, Sequence[float]]) -> None:
        """Store numbers reported by a step, which are equal on every rank, as ``report0.NAME``."""
        for name, numbers in reports.items():
            values = np.array(numbers, dtype=np.float64)
            self.pieces.append((f"report{step}.{name}", values.shape, (slice(0, len(values)),), values))

    def add_state(self, pieces: Iterable[TensorBox]) -> None:
        """Copy this rank's parts of a checkpoint other than weights: moments, main and averaged weights, histories.

        Errors that compressed reductions keep belong to ranks, so that they have no counterpart in other layouts. Bases
        of eigenvectors magnify rounding errors by the ratio of eigenvalues; the weights show their effect.
        """
        for piece in pieces:
            kind, _, name = piece.name.removeprefix("optimizer.").partition(".")
            if kind not in ("model", "compression") and "_basis" not in kind:
                self._add(kind, [replace(piece, name=name)])

    def add_evaluation(self, losses: Mapping[str, float]) -> None:
        """Store losses of an evaluation, which are equal on every rank, as ``evaluation.NAME``."""
        for name, loss in losses.items():
            self.pieces.append((f"evaluation.{name}", (1,), (slice(0, 1),), np.array([loss])))

    def _add(self, label: str, pieces: Iterable[TensorBox]) -> None:
        for piece in pieces:
            box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            values = piece.memory.detach().to("cpu", torch.float64, copy=True).numpy()
            name = piece.name.removeprefix("model.") if label == "weight" else piece.name  # that of parameter_pieces
            name = f"{label}.{name}" + (f" [{self.owner}]" if self.owner else "")
            known = _COPIES.setdefault((name, tuple((span.start, span.stop) for span in box)), values)
            same = np.array_equal(known, values, equal_nan=True)
            self.pieces.append((name, piece.global_shape, box, known if same else values))


def _gradient_pieces(bucket: Bucket, scale: float) -> Iterable[TensorBox]:
    for name, parameter, start, stop, offset in bucket.pieces():
        flat = bucket.grad_shard[offset : offset + stop - start] / scale
        yield from pieces_of(name, spec_of(parameter), tuple(parameter.shape), start, stop, flat)


@dataclass
class Trace:
    """The assembled traces of all ranks."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, np.ndarray]
    faults: list[str]
    """Inconsistencies between ranks: different reports, different copies of an element, missing elements."""


def assemble(traces: Sequence[RankTrace]) -> Trace:
    """Assemble whole tensors from the parts of all ranks.

    Copies of an element must be bitwise equal, because they are results of the same sum.
    """
    first = traces[0]
    faults = [
        f"rank {rank} reports a different {quantity} from rank 0"
        for rank, other in enumerate(traces)
        for quantity, ours, theirs in (("loss", first.losses, other.losses), ("norm", first.norms, other.norms))
        if not np.array_equal(ours, theirs, equal_nan=True)
    ]
    tensors: dict[str, np.ndarray] = {}
    known: dict[str, np.ndarray] = {}
    differing: dict[str, None] = {}
    for trace in traces:
        for name, shape, box, values in trace.pieces:
            full = tensors.setdefault(name, np.zeros(shape))
            seen = known.setdefault(name, np.zeros(shape, dtype=bool))
            if not np.array_equal(full[box][seen[box]], values[seen[box]], equal_nan=True):
                differing[name] = None
            full[box] = values
            seen[box] = True
    if differing:
        faults.append(f"ranks hold different copies of {', '.join(sorted(differing))}")
    incomplete = [name for name, seen in known.items() if not seen.all()]
    if incomplete:
        faults.append(f"no rank holds some elements of {', '.join(sorted(incomplete))}")
    return Trace(first.losses, first.norms, tensors, faults)
