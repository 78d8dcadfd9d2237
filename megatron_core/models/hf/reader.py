"""A folder of Hugging Face, read as a checkpoint of ours: each rank reads the boxes that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.config import RunConfig
from megatron_core.config.validate import problems, without_data
from megatron_core.errors import CheckpointError
from megatron_core.models.build import global_shapes
from megatron_core.models.hf.architecture import Settings, fault
from megatron_core.models.hf.architectures import architecture_of
from megatron_core.models.hf.files import TensorFiles, read_json
from megatron_core.models.hf.tensors import TensorSource
from megatron_core.parallel.boxes import Box
from megatron_core.parallel.texts import listed

CONFIG = "config.json"
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
DERIVED = {
    "gpt2": r"h\.\d+\.attn\.(masked_)?bias",
    "gpt_neox": r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
}
"""Names, by ``model_type``, of tensors that old releases stored and that are computed from the configuration."""
DERIVED_ELSEWHERE = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq"
PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of DeepSeek-V3's config.json: the number of layers behind the others, for multi-token prediction."""
PREFIXES = ("model.", "optimizer.main.")


class HuggingFaceReader:
    """An open folder of Hugging Face with the interface of ``CheckpointReader``; a context manager.

    It has weights only: ``optimizer.main.NAME`` is the weight, too, and there is no other optimizer state. ``config``
    is a run that trains the model. The files must hold every tensor of the model, and no other.
    Errors: ``CheckpointError`` for files, settings and tensors that are missing, damaged or not supported.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.theirs = read_json(self.folder / CONFIG)
        self.architecture = architecture_of(self.theirs)
        self.config = config_of_folder(folder)
        self.model = self.config.model
        self.state: dict[str, Any] = {"vocab_size": _vocab_size(self.theirs)}
        self._sources: dict[tuple[str, tuple[int, ...]], TensorSource] = {}
        """Of our tensors whose shapes and dtypes have been compared."""
        self._files = TensorFiles(self.folder)
        try:
            self._check_sizes()
            self._check_complete()
        except CheckpointError:
            self._files.close()
            raise

    def __enter__(self) -> HuggingFaceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def has(self, name: str) -> bool:
        """Whether the folder has a tensor of ours: it has weights, and no other state of the optimizer."""
        return _plain(name) is not None

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of every piece; dtypes are converted."""
        for piece in pieces:
            name = _plain(piece.name)
            if name is None:
                raise CheckpointError(f"{self.folder} has no {piece.name}; it holds weights only")
            source = self._source(name, piece.global_shape)
            for theirs, box, ours in source.parts(self.model, piece.global_shape, piece.box):
                piece.memory[ours.within(piece.box)] = self._read(theirs, box, source).to(piece.memory)

    def dtype(self) -> torch.dtype:
        """Of the stored weights: that of the embedding."""
        return self._files.dtype(self._needed(self.architecture.source(EMBEDDING).names[0]))

    def _check_sizes(self) -> None:
        """Compare the sizes of config.json with the files before a model of these sizes is described."""
        embedding = self.architecture.source(EMBEDDING)
        self._check_shape(embedding.names[0], (self.state["vocab_size"], self.model.hidden_size))
        self._check_last("layers", self.model.num_layers, self.model.num_layers - 1, 0)
        if self.model.num_experts and self.model.expert_layers:
            self._check_last(
                "experts", self.model.num_experts, self.model.expert_layers[-1], self.model.num_experts - 1
            )

    def _check_last(self, what: str, count: int, layer: int, expert: int) -> None:
        """``CheckpointError`` unless a tensor of the last layer, or of the last expert there, is stored."""
        mark = "{e}" if what == "experts" else ""
        sources = (source.for_layer(str(layer)) for name, source in self.architecture.tensors.items() if "{n}" in name)
        names = (name.replace("{e}", str(expert)) for source in sources for name in source.names if mark in name)
        if not any(self._stored(name) for name in names):
            raise CheckpointError(
                f"{self.folder}: {CONFIG} asks for {count} {what}, and the files have no tensor of the last one; "
                f"correct the number of {what}, or copy the files again"
            )

    def _check_complete(self) -> None:
        """``CheckpointError`` unless the model needs every tensor in the files, and no other."""
        ours = global_shapes(self.config, self.state["vocab_size"])
        shapes = (self.architecture.source(name).their_shapes(self.model, shape) for name, shape in ours.items())
        used = {self._stored(name) or name for each in shapes for name in each}
        # Some files repeat the embedding as the output layer's weight.
        head = self.architecture.source(HEAD).names
        tied = set(map(self._stored, head)) if self.model.share_embeddings_and_output_weights else set()
        for name in self._files.names & tied:
            self._check_tied(name)
        others = self._files.names - used - tied
        unused = sorted(name for name in others if not self._is_derived(name) and not self._predicts(name))
        missing = sorted(used - self._files.names)
        if missing or unused:
            faults = {"missing": missing, "without a use": unused}
            told = "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items() if names)
            raise CheckpointError(
                f"{self.folder}: its tensors and {CONFIG} do not agree; {told}; correct {CONFIG}, or copy all again"
            )
        for name, shape in ours.items():
            self._source(name, shape)

    def _is_derived(self, name: str) -> bool:
        """Whether a tensor is computed from the configuration."""
        pattern = DERIVED.get(self.architecture.model_type, DERIVED_ELSEWHERE)
        return re.fullmatch(pattern, name.removeprefix(self.architecture.base)) is not None

    def _predicts(self, name: str) -> bool:
        """Whether a tensor belongs to a layer of multi-token prediction, which is left out."""
        if self.architecture.model_type != "deepseek_v3":
            return False
        further = next((self.theirs[key] for key in PREDICTING if self.theirs.get(key)), 0)
        return any(
            name.startswith(f"model.layers.{layer}.") and f"model.layers.{layer}.eh_proj.weight" in self._files.names
            for layer in range(self.model.num_layers, self.model.num_layers + further)
        )

    def _check_tied(self, head: str) -> None:
        """``CheckpointError`` if the output layer that a file repeats is another one: the releases of transformers
        differ in which of both they take."""
        if not self._files.equal(head, self._needed(self.architecture.source(EMBEDDING).names[0])):
            raise CheckpointError(
                f"{self.folder}: {head} differs from the embedding, but {CONFIG} says tie_word_embeddings=true; "
                "say false there, or remove the tensor"
            )

    def _stored(self, name: str) -> str | None:
        """The name under which a tensor is stored: files of the bare model leave the first part out."""
        short = name.removeprefix(self.architecture.base)
        return name if name in self._files.names else short if short in self._files.names else None

    def _needed(self, name: str) -> str:
        """As ``_stored``, for a tensor that must be there."""
        stored = self._stored(name)
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}, which {CONFIG} asks for")
        return stored

    def _source(self, name: str, shape: tuple[int, ...]) -> TensorSource:
        """The source of our tensor, after comparing shapes and dtypes when it is first asked for."""
        if (name, shape) not in self._sources:
            source = self.architecture.source(name)
            for theirs, wanted in source.their_shapes(self.model, shape).items():
                self._check_shape(theirs, wanted)
            self._sources[name, shape] = source
        return self._sources[name, shape]

    def _check_shape(self, theirs: str, wanted: tuple[int, ...]) -> None:
        stored = self._needed(theirs)
        found = self._files.shape(stored)
        if found != wanted:
            raise CheckpointError(
                f"{self.folder}: {theirs} has the shape {list(found)}, {CONFIG} asks for {list(wanted)}"
            )
        self._files.dtype(stored)

    def _read(self, name: str, box: Box, source: TensorSource) -> Tensor:
        turned = source.transposed and len(box.start) == 2
        part = self._files.read(self._needed(name), box.index[::-1] if turned else box.index)
        return part.t() if turned else part


def settings_of_folder(folder: str | Path) -> Settings:
    """Flat settings of a run that trains the model in ``folder``: its shape, vocabulary size and tokenizer."""
    theirs = read_json(Path(folder) / CONFIG)
    settings = architecture_of(theirs).settings(theirs)
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    found = tokenizer if (Path(folder) / "tokenizer.json").is_file() else {}
    return settings | {"vocab_size": _vocab_size(theirs), "hf_model_type": theirs["model_type"]} | found


def config_of_folder(folder: str | Path) -> RunConfig:
    """The configuration of a run that trains the model in ``folder``.

    Errors: ``CheckpointError`` if no such run is possible.
    """
    config = RunConfig.from_flat(RunConfig().flat() | settings_of_folder(folder))
    length = config.model.max_position_embeddings or config.data.seq_length
    possible = without_data(replace(config, data=replace(config.data, seq_length=length)))
    faults = list(problems(possible, world_size=1))
    if faults:
        raise CheckpointError(f"{Path(folder) / CONFIG}: {'; '.join(faults)}")
    return config


def _vocab_size(theirs: Settings) -> int:
    size = theirs.get("vocab_size")
    return fault("vocab_size", size, "it must be an integer from 1 on") if size is None else size


def _plain(name: str) -> str | None:
    """The parameter's name of a stored tensor; None for optimizer state that is not a weight."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), None)
