"""Loading a checkpoint whose tensors are not exactly those of the model."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from megatron_core.checkpoint import CheckpointReader, TensorBox
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.errors import CheckpointError
from megatron_core.parallel.texts import listed

WEIGHTS = ("model.", "optimizer.main.")
"""Prefixes of weights and of their float32 values, each of which can be read from the other."""


class PartialReader(StateReader):
    """A checkpoint of which the tensors of the model are read that it has; all others keep their values.

    Tensors that the model does not have are not read. Errors: ``CheckpointError`` if there is no weight of the model,
    or one of another shape.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self.folder, self.state, self.only_weights = reader.folder, reader.state, reader.only_weights

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    @property
    def kinds(self) -> list[str]:
        """The stored kinds of optimizer state."""
        return self._reader.kinds

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether a tensor of that name, or a weight from which it can be read, is stored."""
        prefix = next((start for start in WEIGHTS if name.startswith(start)), None)
        names = [name] if prefix is None else [start + name.removeprefix(prefix) for start in WEIGHTS]
        return any(self._reader.has(stored, shape) for stored in names)

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the boxes of stored tensors."""
        self._reader.fill(self._stored(pieces))

    def fill_together(self, pieces: Iterable[TensorBox], device: torch.device) -> None:
        """As ``fill``, on all ranks."""
        self._reader.fill_together(self._stored(pieces), device)

    def _stored(self, pieces: Iterable[TensorBox]) -> Iterator[TensorBox]:
        return (piece for piece in pieces if self.has(piece.name))

    def check_names(
        self, needed: Mapping[str, tuple[int, ...]], is_unused: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Compare shapes, and print the names of the weights that are not stored."""
        stored = {name: shape for name, shape in needed.items() if self.has(name)}
        absent = [name for name in needed if name.startswith("model.") and name not in stored]
        if not any(name.startswith(WEIGHTS) for name in stored):
            raise CheckpointError(f"{self.folder} has no weight of this model; it needs {listed(absent)}")
        self._reader.check_names(stored, lambda name: True)
        if absent:
            names = listed([name.removeprefix("model.") for name in absent])
            note(f"{self.folder} does not have {len(absent)} weights of the model, which keep their values: {names}")
