"""Reading a checkpoint under any layout: each rank reads the parts of the stored boxes that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from megatron_core.checkpoint.boxes import Piece
from megatron_core.checkpoint.manifest import MANIFEST, Manifest, StoredTensor
from megatron_core.errors import CheckpointError


class CheckpointReader:
    """An open checkpoint folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder / MANIFEST)
        self.state = self.manifest.state
        self._files: dict[str, safe_open] = {}
        self._open = ExitStack()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is stored."""
        return name in self.manifest.tensors

    @torch.no_grad()
    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy the stored values into the memory of every piece; dtypes are converted.

        Weights come from the stored main weights where there are some, and main weights from weights where not.
        """
        for piece in pieces:
            filled = 0
            for stored in self._tensor(piece).boxes:
                common = piece.box.intersect(stored.box)
                if common is None:
                    continue
                part = self._file(stored.file).get_slice(stored.key)[common.within(stored.box)]
                piece.memory[common.within(piece.box)] = part.to(piece.memory)
                filled += common.numel
            if filled != piece.box.numel:
                raise CheckpointError(
                    f"{self.folder}: {filled} of {piece.box.numel} elements of {piece.name} are stored; "
                    "the checkpoint is damaged, load another iteration with --ckpt-step"
                )

    def _source(self, name: str) -> str:
        if name.startswith("model."):
            main = "optimizer.main." + name.removeprefix("model.")
            return main if self.has(main) else name
        if name.startswith("optimizer.main.") and not self.has(name):
            return "model." + name.removeprefix("optimizer.main.")
        return name

    def _tensor(self, piece: Piece) -> StoredTensor:
        tensor = self.manifest.tensors.get(self._source(piece.name))
        if tensor is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {piece.name}; the model's flags differ from those of the checkpoint"
            )
        if tensor.shape != piece.global_shape:
            raise CheckpointError(
                f"{self.folder}: {piece.name} has the shape {list(tensor.shape)}, this run needs "
                f"{list(piece.global_shape)}; give the sizes with which the checkpoint was trained"
            )
        return tensor

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            try:
                self._files[name] = self._open.enter_context(safe_open(self.folder / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / name} cannot be read: {error}") from None
        return self._files[name]
