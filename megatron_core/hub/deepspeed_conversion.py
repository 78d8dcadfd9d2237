"""Conversion of DeepSpeed's checkpoints to this project's format, and to weights of Hugging Face."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint.writer import Entry
from megatron_core.errors import CheckpointError
from megatron_core.foreign_json import STRINGS, read_object
from megatron_core.hub.conversion import check_empty, written_folder
from megatron_core.hub.deepspeed import DeepSpeedCheckpoint, read_deepspeed_checkpoint, train_state
from megatron_core.hub.hugging_face.reader import CONFIG
from megatron_core.hub.hugging_face.writer import Group, write_weights
from megatron_core.hub.whole_tensors import save_tensors
from megatron_core.parallel.texts import listed
from megatron_core.vocabularies.companions import companion_files, vocabulary_files

OPTIMIZERS = {("exp_avg", "exp_avg_sq"): "adam", ("exp_avg",): "lion", ("momentum_buffer",): "sgd"}
"""Kinds of optimizer state -> our optimizer."""


def import_deepspeed(
    source: Path,
    save: Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    optimizer: bool | None = None,
) -> str:
    """Write a checkpoint of DeepSpeed into ``save``, which ``Engine.load_checkpoint`` loads in every layout.

    ``dtype`` of the weights: float32 by default, so that 16-bit training loses nothing. ``optimizer``: whether to
    convert its state; None converts it if it can be read. Returns a description. Errors: ``CheckpointError``.
    """
    check_empty(save, source)
    checkpoint = read_deepspeed_checkpoint(source, tag)
    kinds = () if optimizer is False else _kinds(checkpoint, required=bool(optimizer))
    name = _optimizer_of(checkpoint, kinds)
    counters = train_state(checkpoint)
    state = {
        **asdict(counters),
        "client_state": _json(checkpoint.client_state),
        "scheduler": _json(checkpoint.lr_scheduler) if kinds else {},
        "param_groups": [_json(group) for group in checkpoint.param_groups] if kinds else [],
        "optimizer_steps": checkpoint.optimizer_steps if kinds else 0,
        "loss_scale": checkpoint.loss_scale if kinds else {},
        "vocab_size": 0,
        "config": {"optimizer": name} if name else {},  # DeepSpeed stores no others that an engine compares
    }
    entries = _entries(checkpoint, dtype or torch.float32, kinds)
    save_tensors(save, counters.iteration, entries, _tensors(checkpoint, entries), state)
    content = "weights and optimizer state" if kinds else "weights without optimizer state"
    return f"{content} of global step {counters.iteration}"


def _kinds(checkpoint: DeepSpeedCheckpoint, *, required: bool) -> tuple[str, ...]:
    """The kinds of optimizer state that all trained parameters have."""
    try:
        kinds = tuple(
            sorted(
                state_kind for state_kind, states in checkpoint.states.items() if states.keys() == checkpoint.trained
            )
        )
        _ = checkpoint.optimizer_steps
    except CheckpointError:
        if required:
            raise
        return ()
    if required and not kinds:
        raise CheckpointError(
            f"{checkpoint.folder} has no optimizer state; convert the weights alone with --no-optimizer"
        )
    return kinds


def _optimizer_of(checkpoint: DeepSpeedCheckpoint, kinds: tuple[str, ...]) -> str | None:
    """The name of our optimizer that has such state; None for one of torch without a counterpart."""
    settings = checkpoint.config.get("optimizer")
    type_name = str(settings.get("type")) if isinstance(settings, Mapping) else ""
    return "lamb" if "lamb" in type_name.lower() and kinds else OPTIMIZERS.get(kinds)


def _entries(checkpoint: DeepSpeedCheckpoint, dtype: torch.dtype, kinds: tuple[str, ...]) -> list[Entry]:
    """Names, dtypes and shapes of the tensors to write; a tied parameter is written under its first name."""
    first_names = {name: checkpoint.shared.get(name, name) for name in checkpoint.shapes}
    layers = {name: other for other, name in reversed(checkpoint.shared.items()) if name.startswith("tied_modules.")}
    names = {layers.get(name, name): shape for name, shape in checkpoint.shapes.items() if first_names[name] == name}
    entries: list[Entry] = [(f"model.{name}", dtype, shape) for name, shape in names.items()]
    for state_kind in kinds:
        states = checkpoint.states[state_kind]
        entries += [
            (f"optimizer.{state_kind}.{name}", torch.float32, shape)
            for name, shape in names.items()
            if checkpoint.shared.get(name, name) in states
        ]
    return entries + [
        (f"buffers.{name}", buffer.dtype, tuple(buffer.shape)) for name, buffer in checkpoint.buffers.items()
    ]


def _tensors(checkpoint: DeepSpeedCheckpoint, entries: list[Entry]) -> Iterator[Tensor]:
    for name, dtype, _ in entries:
        section, _, path = name.partition(".")
        if section == "model":
            yield checkpoint.weight(path).to(dtype)
        elif section == "buffers":
            yield checkpoint.buffers[path]
        else:
            state, _, parameter = path.partition(".")
            yield checkpoint.state(parameter, state)


def _json(value: Any) -> Any:
    """Plain values as JSON; tensors are left out."""
    if isinstance(value, Mapping):
        return {str(name): _json(item) for name, item in value.items() if not isinstance(item, Tensor)}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value if not isinstance(item, Tensor)]
    return value


def export_deepspeed(
    source: Path,
    folder: Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    hf_config: Path | None = None,
    verify: bool = True,
) -> str:
    """Write the weights with their own names and ``config.json`` as a Hugging Face folder, with tokenizer files.

    ``hf_config``: config.json or its folder; by default it is searched in ``source``, where transformers' Trainer
    writes it. ``verify``: compare names and shapes with the class of `transformers` in config.json. Returns a
    description. Errors: ``CheckpointError``; nothing is written then.
    """
    path = hf_config or source
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give the model's config.json with --hf-config")
    settings = _model_settings(path)
    checkpoint = read_deepspeed_checkpoint(source, tag)
    dtype = dtype or torch.float32
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name not in checkpoint.shared}
    shapes |= {name: tuple(buffer.shape) for name, buffer in checkpoint.buffers.items()}
    with written_folder(folder, source) as incomplete:
        if verify:
            _check_model(path, settings, checkpoint, shapes)
        write_weights(incomplete, (_group(checkpoint, name, shape, dtype) for name, shape in shapes.items()))
        named = settings | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (incomplete / CONFIG).write_text(json.dumps(named, indent=2) + "\n")
        for other in (*vocabulary_files(path.parent), *companion_files(path.parent)):
            shutil.copyfile(other, incomplete / other.name)
    return f"{len(shapes)} tensors of global step {checkpoint.counters['global_steps']}"


def _group(checkpoint: DeepSpeedCheckpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Group:
    """A tensor for ``write_weights``; buffers keep their dtype."""
    buffer = checkpoint.buffers.get(name)
    if buffer is not None:
        return [(name, buffer.dtype, shape)], lambda: [buffer]
    return [(name, dtype, shape)], lambda: [checkpoint.weight(name).to(dtype)]


def _model_settings(path: Path) -> dict[str, Any]:
    return read_object(path, CheckpointError, "give the model's config.json", {"architectures": STRINGS})


def _check_model(
    path: Path, settings: Mapping[str, Any], checkpoint: DeepSpeedCheckpoint, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ``CheckpointError`` unless the model of `transformers` has these tensors."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError("verifying needs transformers: pip install transformers; or use --no-verify") from None
    named = settings.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    model_class = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise CheckpointError(
            f"{path} names the architecture {name[:60]!r}, which transformers {transformers.__version__} does not "
            "have; convert with --no-verify"
        )
    try:
        with torch.device("meta"):
            model = model_class(transformers.AutoConfig.from_pretrained(str(path), local_files_only=True))
    except MemoryError:
        raise
    except Exception as error:  # transformers raises various types for invalid settings
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: transformers cannot make the model: {text}; correct it") from error
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    first: dict[int, str] = {}
    tied = {n for n, p in model.named_parameters(remove_duplicate=False) if first.setdefault(id(p), n) != n}
    missing = [name for name in wanted if name not in shapes and name not in tied]
    other = [name for name, shape in shapes.items() if wanted.get(name) not in (None, shape)]
    unexpected = [name for name in shapes if name not in wanted]
    faults = {"missing": missing, "of another shape": other, "unexpected": unexpected}
    text = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
    if text:
        raise CheckpointError(f"{checkpoint.folder} does not have the tensors of {name} in {path}: {text}")
