"""Low-rank adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint.writer import write_safetensors
from megatron_core.config import ModelConfig, RunConfig
from megatron_core.errors import CheckpointError, quoted
from megatron_core.features.lora.adapters import is_adapter, rows_of_part
from megatron_core.features.lora.settings import NAMES, TuningConfig
from megatron_core.foreign_json import (
    BELOW_1,
    COUNT,
    COUNT_OR_ZERO,
    OBJECT,
    POSITIVE,
    STRING,
    STRING_OR_STRINGS,
    SWITCH,
    KeyType,
    read_object,
)
from megatron_core.hub.hugging_face.architecture import Architecture, architecture_for
from megatron_core.hub.hugging_face.files import TensorFiles
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.models.build import meta_model
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import listed
from megatron_core.text_file import read_table

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PREFIX = "base_model.model."


def _are_layers(value: Any) -> bool:
    """Whether ``value`` is the number of a layer, or a list of such numbers."""
    return COUNT_OR_ZERO.accepts(value) or (isinstance(value, list) and all(map(COUNT_OR_ZERO.accepts, value)))


TYPES: Mapping[str, KeyType] = {
    "r": COUNT,
    "lora_alpha": POSITIVE,
    "lora_dropout": BELOW_1,
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "inference_mode"), SWITCH),
    **dict.fromkeys(("peft_type", "bias"), STRING),
    **dict.fromkeys(("target_modules", "exclude_modules"), STRING_OR_STRINGS),
    "init_lora_weights": KeyType("true, false or a string", lambda value: isinstance(value, bool | str)),
    "layers_to_transform": KeyType("an integer or a list of integers", _are_layers),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "loftq_config"), OBJECT),
}
"""Types of the keys of adapter_config.json that are read."""
ONLY = {"peft_type": "LORA", "bias": "none"}
"""Keys of adapter_config.json with one supported value, which is the default."""
_TABLES = read_table(__file__)
OFF: list[str] = _TABLES["off"]
WITHOUT_EFFECT: list[str] = _TABLES["without_effect"]
EMPTY: tuple[Any, ...] = ("", [], {})
PLAIN_INITIAL: list[str] = _TABLES["initial"]["plain"]
OTHER_WEIGHTS = tuple(_TABLES["initial"]["other_weights"])
REMEDY = "save the adapter again with PEFT"
KINDS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Our kinds of tensors -> theirs."""
_OURS = re.compile(r"(decoder\.layers\.\d+\..+)\.adapter\.(lora_A|lora_B|magnitude)\.(\w+)")
_THEIRS = re.compile(rf"{re.escape(PREFIX)}(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")

OF_PATHS = {
    **dict.fromkeys(("self_attn.out_proj", "attn.out_proj", "attention.out_proj"), "linear_proj"),
    "self_attn.gate_proj": "q_proj",  # gates of attention belong to the queries
}
"""Ends of paths in stored models whose last name is that of another layer here -> name in --lora-target-modules."""


def target_of(module: str) -> str:
    """The name in --lora-target-modules of a module of a stored model."""
    end = ".".join(module.split(".")[-2:])
    return OF_PATHS.get(end, end.rpartition(".")[2])


def adapter_settings(folder: Path) -> dict[str, Any]:
    """The flat settings of a run that trains the adapters in ``folder``.

    Errors: ``CheckpointError`` for kinds of adapters that are not supported.
    """
    content = read_object(folder / CONFIG, CheckpointError, REMEDY, TYPES)
    _check_supported(folder / CONFIG, content)
    settings = {
        "lora_rank": content["r"],
        "lora_alpha": float(content["lora_alpha"]),
        "lora_dropout": float(content.get("lora_dropout") or 0.0),
        "use_rslora": content.get("use_rslora") is True,
        "use_dora": content.get("use_dora") is True,
    }
    with closing(_files(folder)) as files:
        modules = {match[1] for match in map(_THEIRS.fullmatch, files.names) if match}
    unknown = sorted({target_of(module) for module in modules} - NAMES.keys())
    if unknown or not modules:
        raise CheckpointError(
            f"{folder / WEIGHTS} has adapters of {listed(unknown) or 'no layer'}; supported are linear layers of "
            "attention and MLP, such as q_proj and down_proj"
        )
    return settings | {"lora_target_modules": _targets(content, modules)}


def _files(folder: Path) -> TensorFiles:
    """The open file of weights; the pickled one of early releases is read without running code."""
    names = [name for name in (WEIGHTS, PICKLED) if (folder / name).is_file()]
    if not names:
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {PICKLED}; {REMEDY}")
    return TensorFiles(folder, names[0])


def _targets(content: Mapping[str, Any], modules: Collection[str]) -> tuple[str, ...]:
    """The setting lora_target_modules for the stored ``modules``: names, or paths if the file may select layers."""
    entries = content.get("target_modules")
    has_names = isinstance(entries, list) and not any("." in entry for entry in entries)
    if has_names and not content.get("exclude_modules") and content.get("layers_to_transform") is None:
        return tuple(sorted({target_of(module) for module in modules}))
    return tuple(sorted({f"{_modules_before(module)}{target_of(module)}" for module in modules}))


def _modules_before(module: str) -> str:
    """The beginning of the path in --lora-target-modules of a module of a stored model."""
    number = re.search(r"\.(\d+)\.", module)
    experts = re.search(r"\.(?:(shared)_experts?|experts\.\d+)\.", module)
    prefix = "" if number is None else f"*.layers.{number[1]}.*."
    return prefix if experts is None else f"{prefix}{'shared_' if experts[1] else ''}experts."


def _check_supported(path: Path, content: Mapping[str, Any]) -> None:
    """``CheckpointError`` for an adapter that computes, or is trained, in another way than ours."""
    for key, only in ONLY.items():
        if content.get(key) not in (None, only):
            raise CheckpointError(f"{path} says {key}={quoted(content[key])}; only {only!r} is supported")
    missing = [key for key in ("r", "lora_alpha") if content.get(key) is None]
    if missing:
        raise CheckpointError(f"{path} has no {' and no '.join(missing)}; {REMEDY}")
    stated = {key: value for key, value in content.items() if not (value is None or value is False or value in EMPTY)}
    for key, value in stated.items():
        if key in OFF:
            raise CheckpointError(f"{path} says {key}={quoted(value)}, which is not supported; train without it")
        if key not in TYPES and key not in WITHOUT_EFFECT:
            raise CheckpointError(
                f"{path} says {key}={quoted(value)}, which is not a known key of low-rank adapters in PEFT; remove it "
                "if the adapter computes the same without it"
            )
    initial = content.get("init_lora_weights")
    name = "true" if initial is None else str(initial).lower()
    if name.startswith(OTHER_WEIGHTS):
        raise CheckpointError(
            f"{path} says init_lora_weights={quoted(initial)}: PEFT changed the frozen weights at the start of this "
            "training, and the adapter does not fit those of the model. Merge it in PEFT (merge_and_unload) and use "
            "the result in --load-hf, or, except for LoftQ, make a plain adapter with save_pretrained(FOLDER, "
            "path_initial_model_for_weight_conversion=INITIAL)"
        )
    if name not in PLAIN_INITIAL:
        raise CheckpointError(
            f"{path} says init_lora_weights={quoted(initial)}; supported are {', '.join(PLAIN_INITIAL)}"
        )


@dataclass(frozen=True)
class StoredAdapter:
    """A stored adapter as a part of one of ours."""

    module: str
    """Its module in the Hugging Face model."""
    positions: Tensor
    """For each of its rows, the row of our B."""
    expert: int | None = None


@dataclass(frozen=True)
class PeftNames:
    """Correspondence of our adapters and PEFT's for the model ``model`` of an architecture.

    ``shapes`` are the global shapes of our frozen weights by name.
    """

    architecture: Architecture
    model: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    rows_of: Callable[[str, str], tuple[tuple[int, int], ...]]
    """The rows of our weight (name of the layer, part of it) that an adapter covers."""

    def places(self, layer: str, weight_part: str) -> list[StoredAdapter]:
        """The stored adapters that make up the adapter of a part of ``layer``."""
        shape = self.shapes[f"{layer}.weight"]
        source = self.architecture.source(f"{layer}.weight")
        if source.stacked:
            raise CheckpointError(
                f"{self.architecture.model_type} stores the matrices of all experts in one tensor, {source.names[0]}, "
                "for which PEFT's format has no adapters; name only other layers in --lora-target-modules"
            )
        if len(shape) == 3:
            return [
                stored_adapter
                for expert in range(shape[0])
                for stored_adapter in self._places(layer, weight_part, source.of_expert(expert), shape[1:], expert)
            ]
        return self._places(layer, weight_part, source, shape, None)

    def _places(
        self, layer: str, weight_part: str, source: TensorSource, shape: tuple[int, ...], expert: int | None
    ) -> list[StoredAdapter]:
        position = torch.full((shape[0],), -1)
        row = 0
        for start, stop in self.rows_of(layer, weight_part):
            position[start:stop] = torch.arange(row, row + stop - start)
            row += stop - start
        stored_adapters = []
        for name, rows in source.rows_by_name(self.model, shape[0]).items():
            positions = position[torch.tensor(rows)]
            if (positions >= 0).all():
                stored_adapters.append(StoredAdapter(name.removesuffix(".weight"), positions, expert))
            elif (positions >= 0).any():
                raise CheckpointError(
                    f"{self.architecture.model_type} stores {name} as one matrix, of which {layer} has an adapter for "
                    f"the part {weight_part!r} only; name the whole matrix in --lora-target-modules"
                )
        return stored_adapters


def peft_names(config: RunConfig, vocab_size: int) -> tuple[PeftNames, dict[str, tuple[int, ...]]]:
    """The correspondence with PEFT's names for the model of a run, and the shapes of all adapters."""
    specs = {name: spec_of(parameter) for name, parameter in meta_model(config, vocab_size).named_global_parameters()}
    shapes = {name: spec.global_shape for name, spec in specs.items()}
    architecture = architecture_for(config.model, config.checkpoint.hf_model_type)
    names = PeftNames(
        architecture,
        config.model,
        shapes,
        lambda layer, weight_part: rows_of_part(specs[f"{layer}.weight"], weight_part, layer),
    )
    return names, {name: shape for name, shape in shapes.items() if is_adapter(name)}


def parsed(name: str) -> tuple[str, str, str]:
    """The layer, the kind of tensor and the part of the weight in the name of an adapter's parameter."""
    match = _OURS.fullmatch(name)
    assert match is not None, f"{name} is the name of an adapter"
    return match[1], match[2], match[3]


def read_adapter(folder: Path, names: PeftNames, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Our adapters of the global ``shapes`` from a folder in PEFT's format.

    Errors: ``CheckpointError`` if it has not exactly these adapters.
    """
    read_names = set()
    adapters: dict[str, Tensor] = {}
    with closing(_files(folder)) as files:
        for name, shape in shapes.items():
            layer, factor, weight_part = parsed(name)
            tensor: Tensor | None = None
            for stored_adapter in names.places(layer, weight_part):
                stored = f"{PREFIX}{stored_adapter.module}.{KINDS[factor]}"
                if stored not in files.names:
                    raise CheckpointError(_missing(folder, stored, files.names))
                read_names.add(stored)
                files.dtype(stored)
                values = files.read(stored, (slice(None),) * len(files.shape(stored)))
                tensor = torch.full(shape, float("nan"), dtype=values.dtype) if tensor is None else tensor
                target = tensor if stored_adapter.expert is None else tensor[stored_adapter.expert]
                _place(target, values, stored_adapter, factor, stored)
            assert tensor is not None, "every layer is stored"
            adapters[name] = tensor
        if left := sorted(files.names - read_names):
            raise CheckpointError(f"{folder / WEIGHTS} also has {listed(left)}; name these layers, too")
        return adapters


def _missing(folder: Path, stored: str, names: Collection[str]) -> str:
    """The message about a tensor that a file of adapters does not have."""
    target = target_of(stored.removeprefix(PREFIX).rpartition(".lora_")[0])
    modules = [match[1] for match in map(_THEIRS.fullmatch, names) if match and target_of(match[1]) == target]
    if not modules:
        return f"{folder / WEIGHTS} has no {stored}; give the settings in {CONFIG}"
    return (
        f"{folder / WEIGHTS} has adapters of {target} in some layers only, such as {min(modules)}, and no {stored}; "
        f"name these layers in --lora-target-modules, such as '*.layers.0.*.{target}'"
    )


def _place(ours: Tensor, values: Tensor, stored_adapter: StoredAdapter, factor: str, stored: str) -> None:
    """Copy a stored tensor to its part of ours; A of several stored matrices must be the same."""
    if not values.isfinite().all():
        raise CheckpointError(f"{stored} has values that are NaN or infinite; copy the file again")
    wanted = ours.shape if factor == "lora_A" else (len(stored_adapter.positions), *ours.shape[1:])
    if values.shape != wanted:
        raise CheckpointError(f"{stored} has the shape {list(values.shape)}, this run needs {list(wanted)}")
    if factor != "lora_A":
        ours[stored_adapter.positions] = values
    elif ours.isnan().any() or torch.equal(ours, values):
        ours.copy_(values)
    else:
        raise CheckpointError(
            f"{stored} differs from that of another matrix of the same fused weight; name its parts, such as q_proj "
            "k_proj v_proj, in --lora-target-modules"
        )


def write_adapter(
    folder: Path, names: PeftNames, tensors: Mapping[str, Tensor], tuning: TuningConfig, base: str | None
) -> None:
    """Write our adapters into ``folder`` in PEFT's format; ``base`` is the folder or name of the model."""
    stored = dict(_stored(names, tensors))
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()]
    write_safetensors(folder / WEIGHTS, entries, stored.values(), {"format": "pt"})
    modules = {match[1] for match in map(_THEIRS.fullmatch, stored) if match}
    if not any("." in target for target in tuning.lora_target_modules):
        modules = _short_names(names, modules)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": tuning.lora_rank,
        "lora_alpha": tuning.lora_alpha,
        "lora_dropout": tuning.lora_dropout,
        "target_modules": sorted(modules),
        "use_rslora": tuning.use_rslora,
        "use_dora": tuning.use_dora,
        "bias": "none",
        "fan_in_fan_out": any(names.architecture.source(f"{parsed(n)[0]}.weight").transposed for n in tensors),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def _short_names(names: PeftNames, modules: set[str]) -> set[str]:
    """The last names of ``modules``, unless PEFT would find modules of the model without an adapter by them, too.

    GPT-2 has a ``c_proj`` in attention and one in the MLP.
    """
    short = {module.rpartition(".")[2] for module in modules}
    frozen = {name: shape for name, shape in names.shapes.items() if not is_adapter(name)}
    sources = ((names.architecture.source(name), shape) for name, shape in frozen.items())
    stored = {name for source, shape in sources for name in source.stored_shapes(names.model, shape)}
    others = {name.removesuffix(".weight") for name in stored if name.endswith(".weight")} - modules
    return modules if any(module.rpartition(".")[2] in short for module in others) else short


def _stored(names: PeftNames, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        layer, factor, weight_part = parsed(name)
        for stored_adapter in names.places(layer, weight_part):
            values = tensor if stored_adapter.expert is None else tensor[stored_adapter.expert]
            yield (
                f"{PREFIX}{stored_adapter.module}.{KINDS[factor]}",
                values if factor == "lora_A" else values[stored_adapter.positions],
            )
