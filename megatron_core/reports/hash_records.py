"""Records of hashes: one line for each recorded step, and the first difference of two runs.

    {"kind": "start", "version": 1, "iteration": 0, "layout": "tp2", "world_size": 2, "by_tensor": false, ...}
    {"kind": "hashes", "iteration": 3, "loss": 4.1, "grad_norm": 1.2, "gradients": "5f0c...", "optimizer": "81aa...",
     "weights": "0b17...", "hash_seconds": 0.002, "step_seconds": 0.31}

A hash is that of the whole model and does not depend on the layout (``reports.hash_sums``). Losses and norms are
written with all their digits. With ``by_tensor`` a line also has the hash of each tensor, in the order of a step. The
line of the iteration at which a run starts has only the weights and the optimizer's state.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_core.errors import DataError, shortened
from megatron_core.foreign_json import any_real, items, mapping, maybe, numeric, text, whole, wrong
from megatron_core.monitor.sinks import METRICS, LineFile, as_json
from megatron_core.reports.metrics import from_json, parsed_lines

VERSION = 1
TENSORS = ("gradients", "optimizer", "weights")
"""Sets of tensors with hashes."""
ORDER = ("loss", "gradients", "grad_norm", "optimizer", "weights")
"""The quantities of a record in the order in which a step computes them."""
_NAMES = {
    "loss": "the loss", "gradients": "the gradients", "grad_norm": "the gradient norm",
    "optimizer": "the optimizer's state", "weights": "the weights",
}  # fmt: skip
_ONE = {"gradients": "the gradient of", "optimizer": "the state", "weights": "the weight"}


@dataclass(frozen=True, kw_only=True)
class HashRecord:
    """Hashes of one step; None: not part of the record."""

    iteration: int
    loss: float | None = None
    grad_norm: float | None = None
    gradients: str | None = None
    """Of the gradients summed over all ranks, before clipping."""
    optimizer: str | None = None
    """Of the optimizer's state after the step."""
    weights: str | None = None
    """Of the weights after the step."""
    by_tensor: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Hashes by name for each of ``TENSORS``."""
    differing_copies: Sequence[str] = ()
    """Tensors whose copies on several ranks differ."""


@dataclass(frozen=True)
class HashDifference:
    """The first difference of two runs."""

    iteration: int
    quantity: str
    """One of ``ORDER``."""
    tensor: str | None = None
    """Name of the first differing tensor, if both records have hashes by tensor."""
    differing: int = 0
    tensors: int = 0
    """Numbers of differing tensors and of all tensors of this quantity."""

    @property
    def module(self) -> str | None:
        """The module of ``tensor``."""
        return None if self.tensor is None else self.tensor.rpartition(".")[0]

    def __str__(self) -> str:
        where = f"iteration {self.iteration}: "
        if self.tensor is None:
            return f"{where}{_NAMES[self.quantity]} {'differs' if self.quantity in _SINGULAR else 'differ'} first"
        return (
            f"{where}{_ONE[self.quantity]} {self.tensor} differs first, in the module {self.module}; "
            f"{self.differing} of {self.tensors} tensors of {_NAMES[self.quantity]} differ"
        )


_SINGULAR = ("loss", "grad_norm", "optimizer")


def first_hash_difference(one: Sequence[HashRecord], other: Sequence[HashRecord]) -> HashDifference | None:
    """The first difference in the order of iterations and of the computation; None without a difference.

    Iterations and quantities that only one run has are not compared.
    """
    theirs = {record.iteration: record for record in other}
    for record in one:
        match = theirs.get(record.iteration)
        difference = None if match is None else _difference(record, match)
        if difference is not None:
            return difference
    return None


def _difference(one: HashRecord, other: HashRecord) -> HashDifference | None:
    for quantity in ORDER:
        value, other_value = getattr(one, quantity), getattr(other, quantity)
        if value is None or other_value is None or repr(value) == repr(other_value):  # the texts of two NaN are equal
            continue
        hashes, other_hashes = (record.by_tensor.get(quantity, {}) for record in (one, other))
        if not hashes or not other_hashes:
            return HashDifference(one.iteration, quantity)
        names = list(dict.fromkeys([*hashes, *other_hashes]))
        differing = [name for name in names if hashes.get(name) != other_hashes.get(name)]
        return HashDifference(one.iteration, quantity, differing[0], len(differing), len(names))
    return None


def compared_iterations(one: Sequence[HashRecord], other: Sequence[HashRecord]) -> list[int]:
    """The iterations with records of both runs that have a common quantity."""
    theirs = {record.iteration: record for record in other}

    def has_common(record: HashRecord) -> bool:
        match = theirs.get(record.iteration)
        return any(None not in (getattr(record, quantity), getattr(match, quantity, None)) for quantity in ORDER)

    return [record.iteration for record in one if has_common(record)]


def hash_file(metrics: Path) -> Path:
    """Path of the records next to a metrics file: ``metrics.hashes.jsonl``."""
    return metrics.with_suffix(".hashes.jsonl")


class HashWriter:
    """Appends records to a file; each process starts with a header."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """``about``: further fields of the header."""
        first = json.dumps({"kind": "start", "version": VERSION, **about})
        self._file = LineFile(path, "record_hashes", METRICS, first=first, prints_note=False)

    def write(self, record: HashRecord, **times: float) -> None:
        """Append a record with the processor time of the step and of its hashes."""
        values = {name: value for name, value in asdict(record).items() if value not in (None, {}, ())}
        line = json.dumps(as_json({"kind": "hashes", **values, **times}), allow_nan=False)
        self._file.try_write(line, "record_hashes")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_FIELDS = {"iteration": whole()}
_OPTIONAL = {
    "loss": maybe(any_real), "grad_norm": maybe(any_real), **dict.fromkeys(TENSORS, maybe(text)),
    "by_tensor": mapping(mapping(text)), "differing_copies": items(text), "hash_seconds": numeric(),
    "step_seconds": numeric(),
}  # fmt: skip


def find_hashes(run: str | Path) -> Path:
    """The records of a run from their path, its metrics file or its folder. Errors: ``DataError``."""
    path = Path(run)
    if path.is_dir():
        path = hash_file(path / "metrics.jsonl")
    elif not path.name.endswith(".hashes.jsonl"):
        path = hash_file(path)
    if not path.is_file():
        raise DataError(f"{run} has no records of hashes ({path.name}); train with --record-hashes")
    return path


def read_hashes(run: str | Path) -> list[HashRecord]:
    """The records of a run by iteration; after a resume those of the resumed run replace later ones.

    A line cut off by a kill is ignored. Errors: ``DataError``.
    """
    path = find_hashes(run)
    records = list[HashRecord]()
    for record in _records(path):
        while records and records[-1].iteration > record.iteration:
            records.pop()
        if records and records[-1].iteration == record.iteration:
            old = records.pop()
            if record.loss is None:  # the state that a resumed run has loaded, after the step of the earlier one
                tensors = {**old.by_tensor, **record.by_tensor}
                record = replace(old, optimizer=record.optimizer, weights=record.weights, by_tensor=tensors)
        records.append(record)
    if not records:
        raise DataError(f"{path} has no record of hashes; train with --record-hashes")
    return records


def _records(path: Path) -> Iterator[HashRecord]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give the records of a run") from error
    for number, record in parsed_lines(lines):
        if record.get("kind") == "start" and record.get("version") != VERSION:
            version = shortened(str(record.get("version")), 40)
            raise DataError(f"{path} has records of version {version}; this program reads version {VERSION}")
        if record.get("kind") != "hashes":
            continue
        try:
            record = from_json(record)
            faults = wrong(record, _FIELDS, _OPTIONAL)
        except (ValueError, TypeError, AttributeError):
            faults = ["non_finite"]
        if faults:
            raise DataError(f"{path}, line {number} is not a record of hashes: missing or wrong: {', '.join(faults)}")
        known = {name: record[name] for name in (*_FIELDS, *_OPTIONAL) if name in record}
        yield HashRecord(**{name: value for name, value in known.items() if not name.endswith("_seconds")})
