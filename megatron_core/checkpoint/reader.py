"""Reads a checkpoint under any layout: each rank reads only the parts of the stored boxes that it needs.

``open_newest`` finds the newest intact one, on all ranks together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_core.checkpoint.boxes import Box, TensorBox
from megatron_core.checkpoint.chunks import page_cache_of
from megatron_core.checkpoint.folder import Candidates, find_candidates, find_checkpoint, iteration_of
from megatron_core.checkpoint.hashes import damage, inside, wrong_sizes
from megatron_core.checkpoint.manifest import MANIFEST, TORCH_DTYPES, Manifest, StoredBox, StoredTensor
from megatron_core.checkpoint.one_pass import OnePass
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.errors import CheckpointError
from megatron_core.locations import in_storage
from megatron_core.parallel.texts import gather_from_all_ranks, listed, raise_on_all_ranks


class CheckpointReader(StateReader):
    """An open checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder / MANIFEST)
        self.state = self.manifest.state
        self.is_hashed = False
        """Whether the hashes of the files with tensors have been compared, or need not be."""
        self._files: dict[str, safe_open] = {}
        self._open = ExitStack()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether a tensor of that name, and of ``shape`` if given, is stored."""
        tensor = self.manifest.tensors.get(name)
        return tensor is not None and shape in (None, tensor.shape)

    @property
    def kinds(self) -> list[str]:
        """The stored kinds of optimizer state."""
        stored = (name.split(".") for name in self.manifest.tensors)
        return sorted({words[1] for words in stored if words[0] == "optimizer"})

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor."""
        return TORCH_DTYPES[self.manifest.tensors[name].dtype]

    def verify(self, share: int = 0, shares: int = 1, *, with_tensors: bool = True, is_first: bool = True) -> list[str]:
        """Check sizes and hashes of part ``share`` of ``shares`` of the files; returns the faults.

        ``with_tensors=False``: of the files with tensors only the sizes, because ``fill_together`` compares hashes;
        ``is_first``: whether this rank compares the sizes of all files, for its host.
        """
        files = self.manifest.files
        self.is_hashed = with_tensors
        if with_tensors:
            return [*damage(self.folder, files, share=share, shares=shares).values()]
        without_tensors = {name: file for name, file in files.items() if name not in self.manifest.files_of_tensors}
        sizes = wrong_sizes(self.folder, files) if is_first else []
        return [*sizes, *damage(self.folder, without_tensors, share=share, shares=shares).values()]

    def read(self, name: str) -> Tensor:
        """Read the whole tensor ``name`` in its stored dtype."""
        tensor = self.manifest.tensors[name]
        values = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        origin = Box((0,) * len(tensor.shape), tensor.shape)
        for box, box_values in self.boxes(name):
            values[box.within(origin)] = box_values
        return values

    def boxes(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        """Read the stored boxes of the tensor ``name`` one at a time; yield each with its values."""
        tensor = self.manifest.tensors[name]
        for stored in tensor.boxes:
            yield stored.box, self._slice(tensor, stored)[stored.box.within(stored.box)]

    def check_names(
        self, needed: Mapping[str, tuple[int, ...]], is_unused: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Compare the stored tensors with the global shapes that all ranks of a run need.

        Tensors of a kind that is not in ``needed`` (such as optimizer state that is not read) may be stored too.
        Errors: ``CheckpointError`` that lists missing, unexpected and differently shaped tensors.
        """
        tensors = self.manifest.tensors
        missing = [name for name in needed if self._source(name) not in tensors]
        # A run without main weights reads them as its weights.
        kinds = {_kind(name) for name in needed} - {"optimizer.main"}
        unexpected = [name for name in tensors if not (name in needed or is_unused(name)) and _kind(name) in kinds]
        other = [
            f"{name} has the shape {list(tensors[source].shape)}; this run needs {list(shape)}"
            for name, shape in needed.items()
            if (source := self._source(name)) in tensors and tensors[source].shape != shape
        ]
        faults = [
            f"{len(names)} {what} ({listed(names)})"
            for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
            if names
        ]
        if faults:
            raise CheckpointError(
                f"{self.folder} does not have the tensors of this run: {'; '.join(faults)}; use the settings with "
                "which the checkpoint was trained"
            )

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of every piece, converting dtypes.

        Weights are read from the stored main weights if there are any; main weights from weights if not.
        """
        for piece in pieces:
            filled = 0
            tensor = self._tensor(piece)
            for stored in tensor.boxes:
                common = piece.box.intersect(stored.box)
                if common is None:
                    continue
                values = self._slice(tensor, stored)[common.within(stored.box)]
                piece.memory[common.within(piece.box)] = values.to(piece.memory)
                filled += common.numel
            self._check_filled(piece, filled)

    @torch.no_grad()
    def fill_together(self, pieces: Iterable[TensorBox], device: torch.device) -> None:
        """Like ``fill`` on all ranks of the job: each byte is read by one rank, which sends it to the others.

        Files whose hashes have not been compared are hashed meanwhile. Errors: ``CheckpointError`` on all ranks, for
        damaged files ``DamagedCheckpoint``; the memory of the pieces may have wrong values then.
        """
        named = list[tuple[str, TensorBox]]()
        problem = ""
        try:
            for piece in pieces:
                tensor = self._tensor(piece)
                overlaps = (piece.box.intersect(stored.box) for stored in tensor.boxes)
                self._check_filled(piece, sum(overlap.numel for overlap in overlaps if overlap is not None))
                named.append((self._source(piece.name), piece))
        except CheckpointError as error:
            problem = str(error)
        # A rank that raised alone would leave the others waiting for its messages.
        raise_on_all_ranks(problem, device)
        OnePass(self.folder, self.manifest, device, hashed=not self.is_hashed).fill(named)
        self.is_hashed = True

    def _check_filled(self, piece: TensorBox, filled: int) -> None:
        if filled != piece.box.numel:
            raise CheckpointError(
                f"{self.folder}: {filled} of {piece.box.numel} elements of {piece.name} are stored; "
                "the checkpoint is damaged, load another iteration with --ckpt-step"
            )

    def _source(self, name: str) -> str:
        # Main weights are the float32 values of which 16-bit weights are rounded copies: read from them, weights of any
        # dtype lose nothing, and a run may change its dtype.
        if name.startswith("model."):
            main = "optimizer.main." + name.removeprefix("model.")
            return main if self.has(main) else name
        if name.startswith("optimizer.main.") and not self.has(name):
            return "model." + name.removeprefix("optimizer.main.")
        return name

    def _tensor(self, piece: TensorBox) -> StoredTensor:
        tensor = self.manifest.tensors.get(self._source(piece.name))
        if tensor is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {piece.name}; the model's settings differ from those of the checkpoint"
            )
        if tensor.shape != piece.global_shape:
            raise CheckpointError(
                f"{self.folder}: {piece.name} has the shape {list(tensor.shape)}, this run needs "
                f"{list(piece.global_shape)}; give the sizes with which the checkpoint was trained"
            )
        return tensor

    def _slice(self, tensor: StoredTensor, stored: StoredBox):
        """The lazily read slice of a box, checked against the manifest."""
        path = self.folder / stored.file
        try:
            lazy_slice = self._file(stored.file).get_slice(stored.key)
        except SafetensorError as error:
            raise CheckpointError(f"{path} has no {stored.key}: {error}") from None
        if (tuple(lazy_slice.get_shape()), lazy_slice.get_dtype()) != (stored.box.shape, tensor.dtype):
            raise CheckpointError(
                f"{path}: {stored.key} is {lazy_slice.get_dtype()} {list(lazy_slice.get_shape())}, not {tensor.dtype} "
                f"{list(stored.box.shape)} as {MANIFEST} says; the checkpoint is damaged"
            )
        return lazy_slice

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            try:
                path = inside(self.folder, name)
                remote = in_storage(path)
                if remote is None:
                    file = self._open.enter_context(safe_open(path, framework="pt"))
                else:
                    file = remote.open_tensors()
                metadata = file.metadata() or {}
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / name} cannot be read: {error}") from None
            # Names, shapes and sizes of two saves are equal: only the id tells whether a file was copied from another
            # one.
            expected = (self.manifest.save_id, str(self.manifest.iteration))
            if (metadata.get("save_id"), metadata.get("iteration")) != expected:
                raise CheckpointError(
                    f"{self.folder / name} was written by another save (iteration "
                    f"{metadata.get('iteration', 'unknown')}) than {MANIFEST} there (iteration "
                    f"{self.manifest.iteration})"
                )
            self._files[name] = file
        return self._files[name]


def _kind(name: str) -> str:
    """``model``, or ``optimizer.`` and the name of the state."""
    words = name.split(".")
    return words[0] if words[0] == "model" else ".".join(words[:2])


def open_newest(
    load: str,
    step: int | None,
    temporary: Path | None = None,
    *,
    verify: bool = True,
    hash_later: bool = False,
    damaged: Mapping[Path, str] = MappingProxyType({}),
    device: torch.device,
) -> CheckpointReader | None:
    """The first of ``find_candidates`` that is intact on every rank; None if the folder has none.

    A collective call; each rank hashes a part of the files, with ``hash_later`` only of those without tensors, because
    the caller uses ``fill_together``. ``temporary`` may contain a fast-restart checkpoint, which is tried first if it
    is newer. A damaged checkpoint is never loaded: if ``load`` is a folder of several checkpoints, the next one is
    tried and rank 0 prints a note. ``damaged``: checkpoints that are known to be, with the reasons.
    Errors: ``CheckpointError``.
    """
    candidates = _candidates(load, step, temporary)
    if candidates.note:
        note(candidates.note)
    refused: list[str] = []
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for folder in candidates.folders:
        reader = None
        fault = ""
        host = page_cache_of(folder)
        # One rank of each host compares the sizes of all files: the others ask the same file system.
        is_first = gather_from_all_ranks(host, device).index(host) == rank
        try:
            fault = damaged.get(folder, "")
            reader = CheckpointReader(folder)
            reader.is_hashed = not verify
            if verify and not fault:
                fault = "; ".join(reader.verify(rank, size, with_tensors=not hash_later, is_first=is_first))
        except CheckpointError as error:
            fault = str(error)
        # Ranks hash different files; all of them must choose the same checkpoint.
        faults = list(dict.fromkeys(text for text in gather_from_all_ranks(fault, device) if text))
        if reader is not None and not faults:
            if refused:
                note(f"loading iteration {reader.manifest.iteration} from {folder} instead")
            return reader
        refused.append("; ".join(faults))
        if not candidates.named:
            note(f"warning: skipped a damaged checkpoint: {refused[-1]}")
    _refuse_all(load, candidates, refused)
    return None


def find_newest(load: str, step: int | None, temporary: Path | None = None, *, verify: bool = True) -> Path | None:
    """Like ``open_newest`` in a single process: the folder of the newest checkpoint whose manifest and files are
    intact.

    Of files with tensors only sizes are checked, because hashing takes as long as reading the whole checkpoint;
    ``open_newest`` hashes on all ranks in parallel.
    """
    candidates = _candidates(load, step, temporary)
    refused: list[str] = []
    for folder in candidates.folders:
        try:
            reader = CheckpointReader(folder)
        except CheckpointError as error:
            refused.append(str(error))
            continue
        faults = reader.verify(with_tensors=False) if verify else []
        if not faults:
            return folder
        refused.append("; ".join(dict.fromkeys(faults)))
    _refuse_all(load, candidates, refused)
    return None


def _refuse_all(load: str, candidates: Candidates, refused: list[str]) -> None:
    """``CheckpointError`` with the faults of all candidates, if there were any."""
    if refused:
        where = "" if candidates.named else f"load={load!r} has no intact checkpoint: "
        raise CheckpointError(
            f"{where}{'; '.join(refused)}; choose another folder, or another iteration with --ckpt-step"
        )


def _candidates(load: str, step: int | None, temporary: Path | None) -> Candidates:
    """The candidates in ``load``, preceded by the one in ``temporary`` if it is newer."""
    candidates = find_candidates(load, step)
    newest = None if candidates.named or temporary is None else find_checkpoint(str(temporary))
    if newest is None or (candidates.folders and iteration_of(newest) <= iteration_of(candidates.folders[0])):
        return candidates
    return replace(candidates, folders=(newest, *candidates.folders))


def note(text: str) -> None:
    """Print ``text`` on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"note: {text}", flush=True)
