"""DeepSpeed's JSON configuration as settings of ``megatron_core.initialize``."""

import base64
import binascii
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed.optimizers import Chosen, optimizer_settings
from deepspeed.reader import Algorithm, ConfigReader
from megatron_core.errors import ConfigError, quoted
from megatron_core.text_file import read_text

OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Sections with device cpu by the old names of ``zero_optimization``."""

TAG_VALIDATIONS = ("IGNORE", "WARN", "FAIL")

CLIPPING = 1.0
"""``gradient_clipping`` without the key: ``GRADIENT_CLIPPING_DEFAULT`` of DeepSpeed 0.19.8."""


@dataclass
class Translation:
    """The result of ``translate``."""

    settings: dict[str, Any]
    """Settings by name, as ``megatron_core.initialize(config=)`` takes them."""
    optimizer: Algorithm | None
    scheduler: Algorithm | None
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    optimizer_class: str | None = None
    """Class of torch.optim that updates the weights; None: the optimizer of ``settings``."""
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``optimizer_class``."""
    tag_validation: str = "FAIL"
    """IGNORE, WARN or FAIL: the result of tags of a checkpoint that differ between ranks."""
    sums_gradients: bool = False
    """Whether gradients are summed over ranks, not averaged."""
    notes: list[str] = field(default_factory=list)
    """One sentence for each reason for which given keys have no effect."""


def read_json(config: Any) -> dict[str, Any]:
    """Return the configuration as a dict, from a mapping, a path, or base64 of a JSON text.

    Errors: ``ConfigError`` if there is no such file, it is not JSON, a key occurs twice, or it is not an object.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"DeepSpeed config={quoted(config)} must be a dict or the path of a JSON file")
    name = os.fspath(config)
    try:
        text = read_text(name) if os.path.exists(name) else _decoded(name)
        found = _parsed(text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}); give a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON ({error}); correct the file") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: a JSON {type(found).__name__}; the configuration must be an object {{...}}")
    return found


def _parsed(text: str) -> Any:
    """Read JSON, or Hjson (with comments, and without some commas) if the package ``hjson`` is installed."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError:
        if importlib.util.find_spec("hjson") is None:
            raise
        return importlib.import_module("hjson").loads(text, object_pairs_hook=_refuse_duplicates)


def _decoded(name: str) -> str:
    try:
        return base64.urlsafe_b64decode(name).decode("utf-8")
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"DeepSpeed config={quoted(name)}: no such file; give the path of a JSON file") from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"DeepSpeed config: {', '.join(map(repr, twice))} occurs twice; remove one of them")
    return dict(pairs)


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the section ``zero_optimization`` in its present form, from old forms."""
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):
        zero = {"stage": int(zero)}
    if not isinstance(zero, Mapping):
        return values
    found = dict(zero)
    for old, new in OLD_OFFLOAD.items():
        if zero.get(old) is True and not found.get(new):
            found[new] = {"device": "cpu"}
    return {**values, "zero_optimization": found}


def translate(
    config: Mapping[str, Any] | str | os.PathLike[str], world_size: int, *, has_mpu: bool = False
) -> Translation:
    """Translate DeepSpeed's configuration for ``world_size`` ranks, those of one pipeline stage.

    ``has_mpu``: ``train_batch_size`` does not count the ranks of ``autotp_size``. DeepSpeed knows them from an ``mpu``
    alone, and without one counts every rank's micro-batches, also equal ones.

    DeepSpeed decays all parameters alike: pass ``model.parameters()`` as ``model_parameters``. The learning rate of
    ``settings`` is constant; ``scheduler`` names the class that changes it.

    Errors: ``ConfigError`` with all problems: unknown and refused keys, ``"auto"`` outside of ``zero_optimization``,
    contradictory keys and values of the wrong type.
    """
    values = with_new_names(read_json(config))
    reader = ConfigReader(values)
    reader.check_keys()
    reader.check_types()
    layout = reader.layout(world_size)
    copies = world_size // layout.ranks_of_a_sample
    triple = reader.batch(copies, copies if has_mpu else copies * layout.tensor)
    if (size := reader.integer("data_parallel_size", copies, 1)) != copies:
        reader.faults.append(f"data_parallel_size={size}, but {copies} ranks hold copies of the model; remove the key")
    settings: dict[str, Any] = {"micro_batch_size": triple[1], "global_batch_size": triple[0]}
    settings["clip_grad"] = reader.number("gradient_clipping", CLIPPING)
    settings |= layout.settings() | reader.precision() | reader.zero(world_size // layout.tensor)
    optimizer, scheduler = reader.algorithm("optimizer"), reader.algorithm("scheduler")
    chosen = Chosen({}) if optimizer is None else optimizer_settings(optimizer.name, optimizer.params, reader.faults)
    if "grad_compression" in settings and "grad_compression" in chosen.settings:
        reader.faults.append(f"optimizer.type={optimizer and optimizer.name} with zero_quantized_gradients: remove one")
    settings |= chosen.settings
    tags = str(reader.get("checkpoint.tag_validation", "FAIL")).upper()
    if tags not in TAG_VALIDATIONS:
        reader.faults.append(f"checkpoint.tag_validation={tags!r} must be one of {', '.join(TAG_VALIDATIONS)}")
    operation = str(reader.get("gradient_allreduce_op", "mean")).lower()
    if operation not in ("mean", "sum"):
        reader.faults.append(f"Invalid gradient_allreduce_op={quoted(operation)}: it must be 'mean' or 'sum'")
    if operation == "sum" and settings["zero_stage"] == 3:
        reader.faults.append("gradient_allreduce_op='sum' is not supported with ZeRO stage 3; use 'mean'")
    if settings.get("grad_compression") == "zero-one-adam" and settings["zero_stage"]:
        reader.faults.append("optimizer.type=ZeroOneAdam needs zero_optimization.stage 0; set it to 0")
    if settings.get("optimizer") == "muon" and layout.tensor > 1:
        reader.faults.append(f"optimizer.type=Muon with tensor_parallel.autotp_size={layout.tensor}: set it to 1")
    if reader.faults:
        raise ConfigError(f"DeepSpeed config: {'; '.join(dict.fromkeys(reader.faults))}")
    own = chosen.torch_class, chosen.torch_params
    return Translation(settings, optimizer, scheduler, *triple, *own, tags, operation == "sum", reader.notes())
