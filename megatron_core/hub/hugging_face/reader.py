"""A Hugging Face folder with the interface of a checkpoint: each rank reads only its own boxes."""

import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.checkpoint.manifest import WEIGHT_DTYPES
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.validate import problems, without_data
from megatron_core.errors import CheckpointError
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.hub.hugging_face.architecture import FP8, Architecture, architecture_of
from megatron_core.hub.hugging_face.files import TensorFiles, read_json
from megatron_core.hub.hugging_face.quantized import Fp8BlockFiles, Mxfp4Files
from megatron_core.hub.hugging_face.rules import Settings, refuse
from megatron_core.hub.hugging_face.tensors import Index, TensorSource
from megatron_core.hub.hugging_face.text_part import is_multimodal, text_settings
from megatron_core.hub.hugging_face.unread_keys import notes_on_unread_keys
from megatron_core.hub.settings import token_ids_json
from megatron_core.models.build import global_shapes
from megatron_core.parallel.texts import listed

CONFIG = "config.json"
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
PREFIXES = ("model.", "optimizer.main.")


def files_of(folder: Path, hf_config: Mapping[str, Any], *, packs_experts: bool, text_only: bool) -> TensorFiles:
    """The open files of a folder, which return quantized weights as bfloat16 or float32.

    ``packs_experts``: the architecture may store experts in MXFP4; ``text_only``: the folder is multimodal.
    """
    quantization = hf_config.get("quantization_config") or {}
    if quantization.get("quant_method") == FP8:
        return Fp8BlockFiles(folder, quantization, text_only=text_only)
    return Mxfp4Files(folder) if packs_experts else TensorFiles(folder, text_only=text_only)


def is_multimodal_folder(folder: Path) -> bool:
    """Whether a folder holds a text model and other parts."""
    return is_multimodal(read_json(folder / CONFIG))


def read_config_json(folder: Path) -> Settings:
    """The content of config.json; of a multimodal folder, that of its text model."""
    hf_config = read_json(folder / CONFIG)
    if not is_multimodal(hf_config):
        # As transformers: files of Ministral 8B say mistral, whose layers all have a window.
        is_ministral = hf_config.get("model_type") == "mistral" and "layer_types" in hf_config
        return {**hf_config, "model_type": "ministral"} if is_ministral else hf_config
    with closing(TensorFiles(folder)) as files:
        return text_settings(hf_config, files.names)


class HuggingFaceReader(StateReader):
    """An open folder of Hugging Face with the interface of ``CheckpointReader``; a context manager.

    It holds weights only: ``optimizer.main.NAME`` reads the weight, and no other optimizer state exists. ``config``
    is a run that trains the model. The files must hold all tensors of the model and no others.
    Errors: ``CheckpointError`` for files, settings and tensors that are missing, damaged or not supported.
    """

    only_weights = True

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.hf_config = read_config_json(self.folder)
        self.architecture = architecture_of(self.hf_config)
        self.config = config_of_folder(folder)
        self.model = self.config.model
        self.state = {
            "vocab_size": _vocab_size(self.architecture, self.hf_config),
            "config": asdict(self.model),
        }
        self._sources: dict[tuple[str, tuple[int, ...]], TensorSource] = {}
        """Sources of our tensors, by name and shape, after the stored shapes and dtypes were checked."""
        self._dtypes: dict[str, torch.dtype] = {}
        """The dtype of our tensor, by name: the widest one of its stored tensors."""
        self._files = files_of(
            self.folder,
            self.hf_config,
            packs_experts=bool(self.architecture.quantized),
            text_only=is_multimodal_folder(self.folder),
        )
        try:
            self._check_sizes()
            self._check_complete()
        except CheckpointError:
            self._files.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether the folder holds a tensor of ours: weights, but no other optimizer state."""
        return _plain(name) is not None

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of each box; dtypes are converted."""
        for piece in pieces:
            name = _plain(piece.name)
            if name is None:
                raise CheckpointError(f"{self.folder} has no {piece.name}; it holds weights only")
            source = self._source(name, piece.global_shape)
            for stored, index, ours in source.parts(self.model, piece.global_shape, piece.box):
                piece.memory[ours.within(piece.box)] = self._read(stored, index, source).to(piece.memory)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a stored weight; in files with FP8, that of the embedding."""
        return self._dtypes[EMBEDDING if isinstance(self._files, Fp8BlockFiles) else name.removeprefix("model.")]

    def _check_sizes(self) -> None:
        """Compare the sizes in config.json with the files before building a model description of these sizes."""
        embedding = self.architecture.source(EMBEDDING)
        self._check_shape(embedding.names[0], (self.state["vocab_size"], self.model.hidden_size))
        layers = range(self.model.num_layers)
        last_layer = max((n for n in layers if not self.model.block_of(n).is_empty), default=len(layers) - 1)
        self._check_last("layers", len(layers), last_layer, 0)
        model = self.model.section(MoEConfig)
        if model.num_experts and model.expert_layers:
            self._check_last("experts", model.num_experts, model.expert_layers[-1], model.num_experts - 1)

    def _check_last(self, unit: str, count: int, layer: int, expert: int) -> None:
        """``CheckpointError`` unless a matrix of the last layer, or of its last expert, is stored."""
        mark = "{e}" if unit == "experts" else ""
        names = [name for name in self.architecture.matrices_of_layer(layer) if mark in name]
        if not names:
            return  # stacked in one tensor, whose shape is checked
        if not any(self._stored(name.replace("{e}", str(expert))) for name in names):
            stated = count // self.architecture.parts_of_layer if unit == "layers" else count
            raise CheckpointError(
                f"{self.folder}: {CONFIG} asks for {stated} {unit}, and the files have no tensor of the last one; "
                f"correct the number of {unit}, or copy the files again"
            )

    def _check_complete(self) -> None:
        """``CheckpointError`` unless the files hold all tensors of the model and no others."""
        ours = global_shapes(self.config, self.state["vocab_size"])
        shapes = (self.architecture.source(name).stored_shapes(self.model, shape) for name, shape in ours.items())
        needed = {self._stored(name) or name for stored_shapes in shapes for name in stored_shapes}
        # Some files repeat the embedding as the output layer's weight.
        head = self.architecture.source(HEAD).names
        tied = set(map(self._stored, head)) if self.model.share_embeddings_and_output_weights else set()
        for name in self._files.names & tied:
            self._check_tied(name)
        constants = self.architecture.constants(self.model)
        self._check_constants(constants)
        unexpected = self._files.names - needed - tied - {self._stored(name) for name in constants}
        unexpected -= set(self.architecture.mtp_tensors(self.hf_config, self.model.num_layers, self._files.names))
        unused = sorted(name for name in unexpected if not self._is_derived(name))
        missing = sorted(needed - self._files.names)
        if missing or unused:
            faults = {"missing": missing, "unexpected": unused}
            listing = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
            raise CheckpointError(
                f"{self.folder}: its tensors and {CONFIG} do not agree; {listing}; correct {CONFIG}, or copy all again"
            )
        for name, shape in ours.items():
            self._source(name, shape)

    def _check_constants(self, constants: Mapping[str, float]) -> None:
        """``CheckpointError`` for a stored scalar that is not the architecture's value, rounded to any dtype."""
        for name, value in constants.items():
            if (stored := self._stored(name)) is None:
                continue
            scalar = self._files.read(stored, ())
            rounded = {torch.tensor(value, dtype=dtype).item() for dtype in WEIGHT_DTYPES.values()}
            if scalar.numel() != 1 or scalar.item() not in rounded:
                raise CheckpointError(
                    f"{self.folder}: {stored} is {scalar.tolist()}; {self.architecture.model_type} models have {value}"
                )

    def _is_derived(self, name: str) -> bool:
        """Whether a tensor is computed from the configuration."""
        return re.fullmatch(self.architecture.derived, name.removeprefix(self.architecture.base)) is not None

    def _check_tied(self, head: str) -> None:
        """``CheckpointError`` if a stored output layer differs from the embedding: releases of transformers disagree
        on which of the two they use."""
        if not self._files.equal(head, self._needed(self.architecture.source(EMBEDDING).names[0])):
            raise CheckpointError(
                f"{self.folder}: {head} differs from the embedding, but {CONFIG} says tie_word_embeddings=true; "
                "say false there, or remove the tensor"
            )

    def _stored(self, name: str) -> str | None:
        """The name of a tensor in the files, with or without the prefix ``base``; None if absent."""
        names = (name, name.removeprefix(self.architecture.base))
        return next((stored for stored in names if stored in self._files.names), None)

    def _needed(self, name: str) -> str:
        """As ``_stored``. Errors: ``CheckpointError`` if absent."""
        stored = self._stored(name)
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}, which {CONFIG} asks for")
        return stored

    def _source(self, name: str, shape: tuple[int, ...]) -> TensorSource:
        """The source of our tensor; its stored shapes and dtypes are checked once."""
        if (name, shape) not in self._sources:
            source = self.architecture.source(name)
            stored_shapes = source.stored_shapes(self.model, shape)
            dtypes = [self._check_shape(stored, wanted) for stored, wanted in stored_shapes.items()]
            self._dtypes[name] = reduce(torch.promote_types, dtypes)
            self._sources[name, shape] = source
        return self._sources[name, shape]

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> torch.dtype:
        """The dtype of a stored tensor. Errors: ``CheckpointError`` for another shape."""
        stored = self._needed(name)
        shape = self._files.shape(stored)
        if shape != wanted:
            raise CheckpointError(
                f"{self.folder}: {name} has the shape {list(shape)}, {CONFIG} asks for {list(wanted)}"
            )
        return self._files.dtype(stored)

    def _read(self, name: str, index: Index, source: TensorSource) -> Tensor:
        return source.turned(self._files.read(self._needed(name), source.turned_index(index)))


def settings_of_folder(folder: str | Path) -> Settings:
    """Flat settings of a run that trains the model in ``folder``: its shape, vocabulary size and tokenizer."""
    hf_config = read_config_json(Path(folder))
    architecture = architecture_of(hf_config)
    settings = architecture.settings(hf_config)
    model_type = architecture.exported_as or architecture.model_type
    settings |= {"vocab_size": _vocab_size(architecture, hf_config), "hf_model_type": model_type}
    settings["hf_token_ids"] = token_ids_json(hf_config)
    if (Path(folder) / "tokenizer.json").is_file():
        settings |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    return settings


def notes_of_folder(folder: str | Path, config: ModelConfig) -> list[str]:
    """Notes for the user about the model in ``folder``, which runs with the settings ``config``."""
    folder = Path(folder)
    hf_config = read_config_json(folder)
    architecture = architecture_of(hf_config)
    notes = [*architecture.notes(hf_config, config), *notes_on_unread_keys(architecture, hf_config)]
    multimodal = is_multimodal_folder(folder)
    if architecture.mtp_names is None and not any(map(hf_config.get, architecture.mtp_layer_keys)) and not multimodal:
        return notes
    with closing(TensorFiles(folder, text_only=multimodal)) as files:
        ahead = architecture.mtp_tensors(hf_config, config.num_layers, files.names)
        parameters = sum(prod(files.shape(name)) for name in ahead)
        left_out = files.parts_left_out()
    if ahead:
        notes.append(
            f"{folder} has layers for multi-token prediction ({len(ahead):,} tensors, {parameters:,} parameters), "
            "which are not read: neither training nor an export contains them"
        )
    if multimodal:
        counts = (f"{module} ({count:,} tensors, {size:,} parameters)" for module, (count, size) in left_out.items())
        notes.append(
            f"{folder} is multimodal: only its text model is read, as {architecture.model_type}; left out: "
            + (", ".join(counts) or "nothing")
        )
    return notes


def config_of_folder(folder: str | Path) -> RunConfig:
    """The configuration of a run that trains the model in ``folder``.

    Errors: ``CheckpointError`` if the model's settings are not valid.
    """
    config = RunConfig.from_flat(RunConfig().flat() | settings_of_folder(folder))
    length = config.model.max_position_embeddings or config.data.seq_length
    possible = without_data(replace(config, data=replace(config.data, seq_length=length)))
    faults = list(problems(possible, world_size=1))
    if faults:
        raise CheckpointError(f"{Path(folder) / CONFIG}: {'; '.join(faults)}")
    return config


def _vocab_size(architecture: Architecture, hf_config: Settings) -> int:
    size = hf_config.get("vocab_size", architecture.defaults.get("vocab_size"))
    return refuse("vocab_size", size, "it must be an integer >= 1") if size is None else size


def _plain(name: str) -> str | None:
    """The parameter's name in the name of a stored tensor; None for optimizer state other than main weights."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), None)
