"""Conversion of checkpoints from and to Hugging Face and from Megatron-LM, with a comparison of logits."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_core.checkpoint import CheckpointReader, find_checkpoint, open_newest
from megatron_core.checkpoint.folder import refuse_foreign
from megatron_core.checkpoint.manifest import MANIFEST
from megatron_core.checkpoint.reader import note
from megatron_core.config import RunConfig
from megatron_core.config.optimizers import AVERAGE
from megatron_core.errors import CheckpointError
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.features.multi_token.settings import MultiTokenConfig
from megatron_core.hub.adapter_export import AveragedReader, MergedReader, opened_merged
from megatron_core.hub.hugging_face import (
    MTP_PREFIX,
    HuggingFaceReader,
    architecture_for,
    notes_of_folder,
    stored_dtype,
    write_hugging_face,
)
from megatron_core.hub.hugging_face.writer import read_whole
from megatron_core.hub.logits import compare_logits
from megatron_core.hub.megatron_lm import MegatronReader
from megatron_core.hub.megatron_lm.arguments import MegatronProgress
from megatron_core.hub.megatron_lm.format import state_at
from megatron_core.hub.megatron_lm.tensor_map import FROZEN
from megatron_core.hub.megatron_lm.writer import Format, write_checkpoint
from megatron_core.hub.settings import TokenIdConfig, read_token_ids
from megatron_core.hub.whole_tensors import save_tensors
from megatron_core.locations import in_storage
from megatron_core.models.build import global_shapes
from megatron_core.prepared_output import new_folder, refuse_inputs
from megatron_core.tokenizers import tokenizer_of
from megatron_core.tokenizers.companions import files_to_store, stored_name
from megatron_core.training.compatibility import refuse_other_formats, stored_config, tokenizer_folder
from megatron_core.vocabularies.companions import companion_files, vocabulary_files


def import_hugging_face(source: Path, save: Path, *, dtype: torch.dtype | None = None, verify: bool = True) -> float:
    """Write the model in the folder ``source`` as iteration 0 into ``save``, one tensor in memory at a time.

    ``dtype`` defaults to the stored dtype. With ``verify`` nothing is written unless both compute the same logits.
    Returns the result of ``compare_logits``, or 0.0 without ``verify``.
    """
    check_empty(save, source)
    with HuggingFaceReader(source) as reader:
        # A run that continues from it uses the model's sequence length, unless --seq-length is given.
        config = replace(reader.config, data=replace(reader.config.data, seq_length=reader.config.max_positions))
        for text in notes_of_folder(source, config.model):
            note(text)
        shapes = global_shapes(config, reader.state["vocab_size"])
        verified = partial(HuggingFaceReader, source)
        difference = compare_logits(verified, config, source, torch.float32) if verify else 0.0
        companions = [*vocabulary_files(source), *companion_files(source)]
        write_native(reader, config, shapes, save, dtype, companions)
    return difference


def import_megatron(
    source: Path,
    save: Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: bool | None = None,
) -> str:
    """Write a checkpoint of Megatron-LM into ``save``, one tensor in memory at a time.

    ``step`` is the iteration, by default the latest. With the state of Adam, training can continue at this iteration;
    with only the weights, the result is iteration 0. ``optimizer``: whether to read the state; None reads it if
    possible. Returns a description of the result.
    """
    check_empty(save, source)
    with MegatronReader(source, step) as reader:
        settings = reader.settings | {"vocab_size": reader.state["vocab_size"]}
        kinds = [] if optimizer is False else reader.kinds
        if optimizer and not kinds:
            raise CheckpointError(
                f"{source} has no optimizer state that can be read: it must be of Adam, and with a distributed "
                "optimizer the checkpoint must have all its files; convert only the weights with "
                "--no-optimizer"
            )
        progress = reader.progress() if kinds else None
        config = RunConfig.from_flat(RunConfig().flat() | settings | dict(progress.settings if progress else {}))
        shapes = global_shapes(config, reader.state["vocab_size"])
        reader.check_complete(shapes, kinds)
        write_native(reader, config, shapes, save, dtype, kinds=kinds, progress=progress)
    if progress is None:
        return "weights without optimizer state, as iteration 0"
    return f"weights and optimizer state of iteration {progress.iteration}"


def check_empty(save: Path, source: Path) -> None:
    """Refuse the folder ``source`` itself as ``save``, and a folder with a checkpoint of this or another program."""
    named = f"--save {save}"
    if in_storage(save) is None:
        refuse_inputs(named, save, source)
        if os.path.lexists(save) and not save.is_dir():
            raise CheckpointError(f"{named} is not a folder; give another one, nothing was written")
    refuse_foreign(named, save)
    if (save / MANIFEST).is_file() or find_checkpoint(str(save)) is not None:
        raise CheckpointError(f"{save} holds a checkpoint; give another folder, nothing was written")


def write_native(
    reader: HuggingFaceReader | MegatronReader,
    config: RunConfig,
    shapes: Mapping[str, tuple[int, ...]],
    save: Path,
    dtype: torch.dtype | None,
    companions: Sequence[Path] = (),
    *,
    kinds: Sequence[str] = (),
    progress: MegatronProgress | None = None,
) -> None:
    """Write the tensors of ``shapes`` and the ``kinds`` of their optimizer state into ``save``.

    ``dtype`` defaults to the stored dtype of each weight.
    ``progress`` is the position of the training; without it the result is iteration 0 of a run of ``config``.
    ``companions``: files of a tokenizer not used by ``config``, stored for a later export.
    """
    state = state_at(progress, reader.state["vocab_size"], config.flat())
    files = files_to_store(tokenizer_of(config.data)) or {f"tokenizer/{stored_name(path)}": path for path in companions}
    dtypes = {name: stored_dtype(name, dtype or reader.dtype_of(f"model.{name}")) for name in shapes}
    entries = [(f"model.{name}", dtypes[name], shape) for name, shape in shapes.items()]
    trained = {name: shape for name, shape in shapes.items() if not name.endswith(FROZEN)}
    entries += [
        (f"optimizer.{state_kind}.{name}", torch.float32, shape)
        for state_kind in kinds
        for name, shape in trained.items()
    ]
    tensors = (read_whole(reader, name, shape, state_kind) for name, state_kind, shape in entries)
    save_tensors(save, state["iteration"], entries, tensors, state, extra_files=files)


def export_hugging_face(
    load: Path,
    folder: Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    model_type: str | None = None,
    verify: bool = True,
    average: bool = False,
) -> float:
    """Write the checkpoint in ``load`` as a Hugging Face folder, with its stored tokenizer files.

    Low-rank adapters are merged with the frozen weights. ``average``: the moving averages instead of the weights.

    ``dtype`` defaults to the stored dtype of each weight, ``model_type`` to the architecture that was imported. The
    folder is created only if it is complete and, with ``verify``, computes the same logits. Sizes and hashes of the
    checkpoint's files are checked first, as in training. Returns the same as ``import_hugging_face``.
    """
    with written_folder(folder, load) as incomplete:
        stored = _newest(load, step)
        folder_of_checkpoint = stored.folder
        config = stored_config(folder_of_checkpoint)
        architecture = architecture_for(config.model, model_type or config.checkpoint.hf_model_type)
        with _opened(stored, config, average=average) as reader:
            model = replace(config.model, max_position_embeddings=config.max_positions)
            merged = config.with_section(TuningConfig())
            shapes = global_shapes(merged, reader.state["vocab_size"])
            keys = special_token_ids(config)
            _note_mtp_layers(merged, shapes)
            write_hugging_face(reader, incomplete, architecture, model, shapes, dtype=dtype, extra_keys=keys)
            export_tokenizer(config, tokenizer_folder(folder_of_checkpoint), incomplete)
        verified = partial(_opened, CheckpointReader(folder_of_checkpoint), config, average=average)
        return compare_logits(verified, merged, incomplete, dtype) if verify else 0.0


@contextmanager
def written_folder(folder: Path, load: Path) -> Iterator[Path]:
    """``new_folder`` for the result of a conversion from ``load``; ``CheckpointError`` if it cannot be written."""
    try:
        with new_folder(f"--save {folder}", folder, load) as incomplete:
            yield incomplete
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def _newest(load: Path, step: int | None) -> CheckpointReader:
    """The newest intact checkpoint in ``load``, or that of iteration ``step``."""
    stored = open_newest(str(load), step, device=torch.device("cpu"))
    if stored is None:
        refuse_other_formats(f"--load {load}", load)
        raise CheckpointError(f"{load} has no checkpoint; give a folder written by --save")
    return stored


def export_distributed(load: Path, folder: Path, form: Format, *, step: int | None = None) -> str:
    """Write the checkpoint in ``load`` as ``--ckpt-format`` ``form``, with the state of Adam; returns a description."""
    with written_folder(folder, load) as incomplete, _newest(load, step) as reader:
        config = stored_config(reader.folder)
        if config.optional("lora_rank") is not None:
            raise CheckpointError(f"{load} has low-rank adapters; export the merged weights with --to hf")
        write_checkpoint(reader, config.model, incomplete, form)
    return f"iteration {reader.state['iteration']} as {form}"


MODEL_FILES = {
    "HuggingFaceTokenizer": "tokenizer.json",
    "SentencePieceTokenizer": "tokenizer.model",
    "Llama2Tokenizer": "tokenizer.model",
}
"""File names of ``--tokenizer-model`` in `transformers`, by tokenizer class."""
CLASSES = {"tokenizer.json": "PreTrainedTokenizerFast", "tokenizer.model": "LlamaTokenizer"}
"""Class in `transformers` that reads the file."""


def export_tokenizer(config: RunConfig, source: Path, folder: Path) -> None:
    """Copy the tokenizer's files in ``source`` under their names in `transformers`.

    Without a tokenizer_config.json, `transformers` would ignore how tokenizer.json splits words.
    """
    data = config.data
    names = {
        data.tokenizer_model: MODEL_FILES.get(data.tokenizer_type or ""),
        data.vocab_file: "vocab.json",
        data.merge_file: "merges.txt",
    }
    paths = (path for pattern in ("*", "*/*") for path in source.glob(pattern))  # rglob does not enter linked folders
    for path in sorted(path for path in paths if path.is_file()):
        target = folder / (names.get(str(path)) or stored_name(path))
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    settings = folder / "tokenizer_config.json"
    tokenizer = tokenizer_of(data)
    model_files = [name for name in CLASSES if (folder / name).is_file()]
    if tokenizer is not None and model_files and not settings.is_file():
        ids = {name: getattr(tokenizer, name, None) for name in ("bos", "eos", "pad")}
        texts = {name: tokenizer.detokenize([id_]) for name, id_ in ids.items() if id_ is not None}
        tokens = {f"{name}_token": text for name, text in texts.items() if text}  # sentencepiece has none
        settings.write_text(json.dumps({"tokenizer_class": CLASSES[model_files[0]]} | tokens, indent=2) + "\n")


def special_token_ids(config: RunConfig) -> dict[str, Any]:
    """Ids of the special tokens in config.json: those of the imported model, else those of the tokenizer.

    A tokenizer with another id is noted. None without a tokenizer or without such a token.
    """
    tokenizer = tokenizer_of(config.data)
    of_tokenizer = {f"{name}_token_id": getattr(tokenizer, name, None) for name in ("bos", "eos", "pad")}
    text = config.section(TokenIdConfig).hf_token_ids
    if text is None:
        return of_tokenizer
    imported = read_token_ids(text)
    for key, token_id in of_tokenizer.items():
        ids = imported.get(key)
        if token_id is not None and token_id not in (ids if isinstance(ids, list) else [ids]):
            note(
                f"config.json has {key}={json.dumps(ids)} of the imported model, the tokenizer has {token_id}; if the "
                "model was trained with another tokenizer than the imported one, edit config.json"
            )
    return imported


def _note_mtp_layers(config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Say that the export leaves out layers for multi-token prediction, which ``transformers`` does not have."""
    left_out = {name: shape for name, shape in shapes.items() if name.startswith(MTP_PREFIX)}
    if left_out:
        parameters = sum(map(prod, left_out.values()))
        predicting = config.model.section(MultiTokenConfig).mtp_num_layers
        note(
            f"mtp_num_layers={predicting}: the export has no layers for multi-token prediction "
            f"({len(left_out):,} tensors, {parameters:,} parameters), because transformers does not read them; keep "
            "the checkpoint to continue their training"
        )


def _opened(stored: CheckpointReader, config: RunConfig, *, average: bool) -> CheckpointReader | MergedReader:
    """A checkpoint's whole weights, or their averages; adapters are merged with the frozen weights."""
    if average:
        stored = AveragedReader(stored.folder)
        if AVERAGE.name not in stored.kinds:
            raise CheckpointError(
                f"{stored.folder} has no average of the weights; train with --ema-decay, or export the weights"
            )
    return stored if config.optional("lora_rank") is None else opened_merged(stored, config)
