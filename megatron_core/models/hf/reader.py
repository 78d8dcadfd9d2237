"""A folder of Hugging Face, read as a checkpoint of ours: each rank reads the boxes that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_core.checkpoint import Piece
from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.models.hf.architecture import Settings, fault
from megatron_core.models.hf.architectures import architecture_of
from megatron_core.models.hf.tensors import Source
from megatron_core.parallel.boxes import Box
from megatron_core.parallel.texts import listed

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DERIVED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
"""Ends of names of tensors that old releases stored and that are computed from the configuration."""
PREFIXES = ("model.", "optimizer.main.")


class HuggingFaceReader:
    """An open folder of Hugging Face with the interface of ``CheckpointReader``; a context manager.

    It has weights only: ``optimizer.main.NAME`` is the weight, too, and there is no other optimizer state.
    Errors: ``CheckpointError`` for files, settings and tensors that are missing, damaged or not supported.
    """

    def __init__(self, folder: str | Path, model: ModelConfig | None = None) -> None:
        self.folder = Path(folder)
        self.theirs = read_json(self.folder / CONFIG)
        self.architecture = architecture_of(self.theirs)
        self.model = model or ModelConfig(**self.architecture.settings(self.theirs))
        self.state: dict[str, Any] = {"vocab_size": _vocab_size(self.theirs)}
        self._files: dict[Path, safe_open] = {}
        self._sources: dict[tuple[str, tuple[int, ...]], Source] = {}
        """Of our tensors whose shapes have been compared."""
        self._open = ExitStack()
        self._where = self._find_tensors()

    def __enter__(self) -> HuggingFaceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._files.clear()

    def has(self, name: str) -> bool:
        """Whether the folder has a tensor of ours: it has weights, and no other state of the optimizer."""
        return _plain(name) is not None

    @torch.no_grad()
    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copy the stored values into the memory of every piece; dtypes are converted."""
        for piece in pieces:
            name = _plain(piece.name)
            if name is None:
                raise CheckpointError(f"{self.folder} has no {piece.name}; it holds weights only")
            source = self._source(name, piece.global_shape)
            for theirs, box, ours in source.parts(self.model, piece.global_shape, piece.box):
                piece.memory[ours.within(piece.box)] = self._read(theirs, box, source).to(piece.memory)

    def check_complete(self, ours: Mapping[str, tuple[int, ...]]) -> None:
        """``CheckpointError`` unless our tensors, by name and shape, need every tensor in the folder, and no other."""
        shapes = (self.architecture.source(name).their_shapes(self.model, shape) for name, shape in ours.items())
        used = {self._stored(name) or name for each in shapes for name in each}
        # Some files repeat the embedding as the output layer's weight.
        head = self.architecture.source("output_layer.weight").names
        tied = set(map(self._stored, head)) if self.model.share_embeddings_and_output_weights else set()
        for name in set(self._where) & tied:
            self._check_tied(name)
        # Layers of multi-token prediction, which stand behind the others and are left out.
        predicting = int(self.theirs.get("num_nextn_predict_layers") or self.theirs.get("num_mtp_layers") or 0)
        further = tuple(f"layers.{self.model.num_layers + at}." for at in range(predicting))
        unused = sorted(
            name
            for name in set(self._where) - used - tied
            if not name.endswith(DERIVED) and not name.removeprefix("model.").startswith(further)
        )
        missing = sorted(used - set(self._where))
        if missing or unused:
            faults = {"missing": missing, "without a use": unused}
            told = "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items() if names)
            raise CheckpointError(f"{self.folder}: its tensors and {CONFIG} do not agree; {told}")
        for name, shape in ours.items():
            self._source(name, shape)

    def dtype(self) -> torch.dtype:
        """Of the stored weights: that of the first one."""
        return self._first_rows(self._embedding(), 1).dtype

    def _embedding(self) -> str:
        name = self.architecture.source("embedding.word_embeddings.weight").names[0]
        stored = self._stored(name)
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return stored

    def _first_rows(self, stored: str, count: int) -> Tensor:
        return self._file(self._where[stored]).get_slice(stored)[:count]

    def _check_tied(self, head: str) -> None:
        """``CheckpointError`` if the output layer that a file repeats is another one: the releases of transformers
        differ in which of both they take. The first rows tell."""
        if not torch.equal(self._first_rows(head, 64), self._first_rows(self._embedding(), 64)):
            raise CheckpointError(
                f"{self.folder}: {head} differs from the embedding, but {CONFIG} says tie_word_embeddings=true; "
                "say false there, or remove the tensor"
            )

    def _find_tensors(self) -> dict[str, Path]:
        """The file of every tensor."""
        if (self.folder / INDEX).is_file():
            files = read_json(self.folder / INDEX).get("weight_map", {})
            return {name: self._inside(file) for name, file in files.items()}
        path = self.folder / WEIGHTS
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder} has neither {WEIGHTS} nor {INDEX}; save the model with transformers' "
                "save_pretrained, which writes safetensors (pickled weights are not read)"
            )
        return dict.fromkeys(self._file(path).keys(), path)

    def _inside(self, file: str) -> Path:
        if Path(file).name != file:
            raise CheckpointError(f"{self.folder / INDEX} names the file {file!r}, which is not in the same folder")
        return self.folder / file

    def _stored(self, name: str) -> str | None:
        """The name under which a tensor is stored: files of the bare model leave the first part out."""
        short = name.removeprefix(self.architecture.base)
        return name if name in self._where else short if short in self._where else None

    def _source(self, name: str, shape: tuple[int, ...]) -> Source:
        """The source of our tensor, after comparing the shapes when it is first asked for."""
        if (name, shape) in self._sources:
            return self._sources[name, shape]
        source = self.architecture.source(name)
        for theirs, wanted in source.their_shapes(self.model, shape).items():
            stored = self._stored(theirs)
            if stored is None:
                raise CheckpointError(f"{self.folder} has no tensor {theirs}, which {CONFIG} asks for")
            found = tuple(self._file(self._where[stored]).get_slice(stored).get_shape())
            if found != wanted:
                raise CheckpointError(
                    f"{self.folder}: {theirs} has the shape {list(found)}, {CONFIG} asks for {list(wanted)}"
                )
        self._sources[name, shape] = source
        return source

    def _read(self, name: str, box: Box, source: Source) -> Tensor:
        stored = self._stored(name)
        assert stored is not None, "shapes were compared"
        part = self._file(self._where[stored]).get_slice(stored)
        turned = source.transposed and len(box.start) == 2
        return part[box.index[::-1]].t() if turned else part[box.index]

    def _file(self, path: Path) -> safe_open:
        if path not in self._files:
            try:
                self._files[path] = self._open.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return self._files[path]


def settings_of_folder(folder: str | Path) -> Settings:
    """Flat settings of a run that trains the model in ``folder``: its shape, vocabulary size and tokenizer."""
    theirs = read_json(Path(folder) / CONFIG)
    settings = architecture_of(theirs).settings(theirs)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    found = tokenizer if (Path(folder) / "tokenizer.json").is_file() else {}
    return settings | {"vocab_size": _vocab_size(theirs), "hf_model_type": theirs["model_type"]} | found


def _vocab_size(theirs: Settings) -> int:
    size = theirs.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else fault("vocab_size", size, "it has to be 1 or more")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; give the folder of a downloaded model of Hugging Face") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _plain(name: str) -> str | None:
    """The parameter's name of a stored tensor; None for optimizer state that is not a weight."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), None)
