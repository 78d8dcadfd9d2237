"""Conversion of DeepSpeed's checkpoints to this project's format, and to weights of Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint.writer import Entry, save_tensors
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import check_empty, written_folder
from megatron_core.hub.deepspeed import DeepSpeedCheckpoint, read_deepspeed_checkpoint
from megatron_core.hub.hugging_face.reader import CONFIG
from megatron_core.hub.hugging_face.writer import Group, write_weights
from megatron_core.parallel.texts import listed
from megatron_core.schema import STRINGS, read_object
from megatron_core.tokenizers.companions import companion_files, vocabulary_files
from megatron_core.training.state import TrainState

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
    found = read_deepspeed_checkpoint(source, tag)
    kinds = () if optimizer is False else _kinds(found, required=bool(optimizer))
    name = _optimizer_of(found, kinds)
    steps = found.counters["global_steps"]
    each = found.counters["global_samples"] // steps if steps else 0
    skipped = found.counters["skipped_steps"]
    counters = TrainState(
        steps, found.counters["global_samples"], skipped_iterations=skipped, skipped_samples=skipped * each
    )
    state = {
        **asdict(counters),
        "client_state": _json(found.client_state),
        "scheduler": _json(found.lr_scheduler) if kinds else {},
        "param_groups": [_json(group) for group in found.param_groups] if kinds else [],
        "optimizer_steps": found.optimizer_steps if kinds else 0,
        "loss_scale": found.loss_scale if kinds else {},
        "vocab_size": 0,
        "config": {"optimizer": name} if name else {},  # DeepSpeed stores no others that an engine compares
    }
    entries = _entries(found, dtype or torch.float32, kinds)
    save_tensors(save, steps, entries, _tensors(found, entries), state)
    content = "weights and optimizer state" if kinds else "weights without optimizer state"
    return f"{content} of global step {steps}"


def _kinds(found: DeepSpeedCheckpoint, *, required: bool) -> tuple[str, ...]:
    """The kinds of optimizer state that all trained parameters have."""
    try:
        kinds = tuple(sorted(kind for kind, states in found.states.items() if states.keys() == found.trained))
        _ = found.optimizer_steps
    except CheckpointError:
        if required:
            raise
        return ()
    if required and not kinds:
        raise CheckpointError(f"{found.folder} has no optimizer state; convert the weights alone with --no-optimizer")
    return kinds


def _optimizer_of(found: DeepSpeedCheckpoint, kinds: tuple[str, ...]) -> str | None:
    """The name of our optimizer that has such state; None for one of torch without a counterpart."""
    settings = found.config.get("optimizer")
    given = str(settings.get("type")) if isinstance(settings, Mapping) else ""
    return "lamb" if "lamb" in given.lower() and kinds else OPTIMIZERS.get(kinds)


def _entries(found: DeepSpeedCheckpoint, dtype: torch.dtype, kinds: tuple[str, ...]) -> list[Entry]:
    """Names, dtypes and shapes of the tensors to write; a tied parameter is written under its first name."""
    used = {name: found.shared.get(name, name) for name in found.shapes}
    layers = {name: other for other, name in reversed(found.shared.items()) if name.startswith("tied_modules.")}
    names = {layers.get(name, name): shape for name, shape in found.shapes.items() if used[name] == name}
    entries: list[Entry] = [(f"model.{name}", dtype, shape) for name, shape in names.items()]
    for kind in kinds:
        held = found.states[kind]
        entries += [
            (f"optimizer.{kind}.{name}", torch.float32, shape)
            for name, shape in names.items()
            if found.shared.get(name, name) in held
        ]
    return entries + [(f"buffers.{name}", buffer.dtype, tuple(buffer.shape)) for name, buffer in found.buffers.items()]


def _tensors(found: DeepSpeedCheckpoint, entries: list[Entry]) -> Iterator[Tensor]:
    for name, dtype, _ in entries:
        kind, _, rest = name.partition(".")
        if kind == "model":
            yield found.weight(rest).to(dtype)
        elif kind == "buffers":
            yield found.buffers[rest]
        else:
            state, _, parameter = rest.partition(".")
            yield found.state(parameter, state)


def _json(value: Any) -> Any:
    """Plain values as JSON; tensors are left out."""
    if isinstance(value, Mapping):
        return {str(name): _json(each) for name, each in value.items() if not isinstance(each, Tensor)}
    if isinstance(value, list | tuple):
        return [_json(each) for each in value if not isinstance(each, Tensor)]
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
    settings = _settings(path)
    found = read_deepspeed_checkpoint(source, tag)
    dtype = dtype or torch.float32
    shapes = {name: shape for name, shape in found.shapes.items() if name not in found.shared}
    shapes |= {name: tuple(buffer.shape) for name, buffer in found.buffers.items()}
    with written_folder(folder, source) as incomplete:
        if verify:
            _check_model(path, settings, found, shapes)
        write_weights(incomplete, (_group(found, name, shape, dtype) for name, shape in shapes.items()))
        named = settings | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (incomplete / CONFIG).write_text(json.dumps(named, indent=2) + "\n")
        for other in (*vocabulary_files(path.parent), *companion_files(path.parent)):
            shutil.copyfile(other, incomplete / other.name)
    return f"{len(shapes)} tensors of global step {found.counters['global_steps']}"


def _group(found: DeepSpeedCheckpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Group:
    """A tensor for ``write_weights``; buffers keep their dtype."""
    buffer = found.buffers.get(name)
    if buffer is not None:
        return [(name, buffer.dtype, shape)], lambda: [buffer]
    return [(name, dtype, shape)], lambda: [found.weight(name).to(dtype)]


def _settings(path: Path) -> dict[str, Any]:
    return read_object(path, CheckpointError, "give the model's config.json", {"architectures": STRINGS})


def _check_model(
    path: Path, settings: Mapping[str, Any], found: DeepSpeedCheckpoint, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ``CheckpointError`` unless the model of `transformers` has these tensors."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError("verifying needs transformers: pip install transformers; or use --no-verify") from None
    named = settings.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(
            f"{path} names the architecture {name[:60]!r}, which transformers {transformers.__version__} does not "
            "have; convert with --no-verify"
        )
    try:
        with torch.device("meta"):
            model = kind(transformers.AutoConfig.from_pretrained(str(path), local_files_only=True))
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
    text = "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items() if names)
    if text:
        raise CheckpointError(f"{found.folder} does not have the tensors of {name} in {path}: {text}")
