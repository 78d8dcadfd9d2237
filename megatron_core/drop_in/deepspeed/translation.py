"""DeepSpeed's JSON configuration as settings of ``megatron_core.initialize``."""

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deepspeed.dotted_names import dotted_names, nested
from deepspeed.optimizers import Chosen, optimizer_settings
from megatron_core.errors import ConfigError, quoted
from megatron_core.schema import NUMBER, whole
from megatron_core.text_file import read_text

AUTO = "auto"
TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Sections with device cpu by the old names of ``zero_optimization``."""

FLAGS = (
    *("dataloader_drop_last", "managed_gradient_accumulation", "fp16.auto_cast", "zero_optimization.cpu_offload"),
    *("zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero_optimization.cpu_offload_param"),
    "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
)
"""Keys that are true or false, without a setting of the engine."""

TAG_VALIDATIONS = ("IGNORE", "WARN", "FAIL")

CLIPPING = 1.0
"""``gradient_clipping`` without the key: ``GRADIENT_CLIPPING_DEFAULT`` of DeepSpeed 0.19.8."""


class Algorithm(NamedTuple):
    """An optimizer or scheduler of the JSON."""

    name: str
    params: dict[str, Any]


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
    notes: list[str] = field(default_factory=list)
    """One sentence for each reason for which given keys have no effect."""


class Key(NamedTuple):
    """A row of the table ``keys.yaml``."""

    use: str
    """translated, without_effect or refused."""
    text: str
    """The setting, the reason or the fix."""
    neutral: str | None = None
    """The value of a refused key that is accepted, besides false, 0, null and none."""


@cache
def known_keys() -> dict[str, Key]:
    """The table ``keys.yaml`` by dotted path; ``section.*`` stands for all keys of a section."""
    table = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
    found = {path: Key("translated", text) for path, text in table["translated"].items()}
    for use, name in (("without_effect", "reason"), ("refused", "fix")):
        for row in table[use]:
            for entry in row["keys"]:
                path, _, neutral = entry.partition("=")
                found[path] = Key(use, row[name], neutral or None)
    return found


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
        found = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}); give a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON ({error}); correct the file") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: a JSON {type(found).__name__}; the configuration must be an object {{...}}")
    return found


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


def translate(config: Mapping[str, Any] | str | os.PathLike[str], world_size: int) -> Translation:
    """Translate DeepSpeed's configuration for ``world_size`` data-parallel ranks.

    DeepSpeed decays all parameters alike: pass ``model.parameters()`` as ``model_parameters``. The learning rate of
    ``settings`` is constant; ``scheduler`` names the class that changes it.

    Errors: ``ConfigError`` with all problems: unknown and refused keys, ``"auto"`` values that nobody filled,
    contradictory keys and values of the wrong type.
    """
    values = with_new_names(read_json(config))
    reader = _Reader(values)
    reader.check_keys()
    reader.check_types()
    triple = reader.batch(world_size)
    settings: dict[str, Any] = {"micro_batch_size": triple[1], "global_batch_size": triple[0]}
    settings["clip_grad"] = reader.number("gradient_clipping", CLIPPING)
    settings |= reader.precision() | reader.zero(world_size)
    optimizer, scheduler = reader.algorithm("optimizer"), reader.algorithm("scheduler")
    chosen = Chosen({}) if optimizer is None else optimizer_settings(optimizer.name, optimizer.params, reader.faults)
    settings |= chosen.settings
    tags = str(reader.get("checkpoint.tag_validation", "FAIL")).upper()
    if tags not in TAG_VALIDATIONS:
        reader.faults.append(f"checkpoint.tag_validation={tags!r} must be one of {', '.join(TAG_VALIDATIONS)}")
    if settings.get("grad_compression") == "zero-one-adam" and settings["zero_stage"]:
        reader.faults.append("optimizer.type=ZeroOneAdam needs zero_optimization.stage 0; set it to 0")
    if reader.faults:
        raise ConfigError(f"DeepSpeed config: {'; '.join(dict.fromkeys(reader.faults))}")
    own = chosen.torch_class, chosen.torch_params
    return Translation(settings, optimizer, scheduler, *triple, *own, tags, notes=reader.notes())


class _Reader:
    """Reads a configuration and collects its faults."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.faults = values, []  # type: dict[str, Any], list[str]
        self.ignored: dict[str, list[str]] = {}

    def check_keys(self) -> None:
        """Sort all given keys by the table."""
        for name, path in dotted_names(self.values):
            self.faults.append(
                f"{path!r} has a dot in its name, which DeepSpeed does not read as a section; write {nested(name)}"
            )
        for path, value in _leaves(self.values):
            key = find_key(path)
            if key is None:
                near = get_close_matches(path, key_names(), 1, 0.7)
                self.faults.append(f"{path} is not a key of DeepSpeed" + (f"; did you mean {near[0]}?" if near else ""))
            elif key.use == "refused":
                if not self._neutral(path, value, key):
                    self.faults.append(f"{path}={quoted(value)} is not supported: {key.text}")
            elif key.use == "without_effect":
                self.ignored.setdefault(key.text, []).append(path)
            elif value == AUTO:
                self.faults.append(
                    f"{path}='auto' has no value: transformers.Trainer and accelerate fill it; set it yourself"
                )

    def _neutral(self, path: str, value: Any, key: Key) -> bool:
        if path.startswith("compression_training."):
            section, switches = self.values["compression_training"], path.split(".")[1]
            return not _enabled(section.get(switches))
        section = self.get(path.rpartition(".")[0], None)
        top = self.values.get(path.partition(".")[0])
        off = (isinstance(top, Mapping) and "stage" not in top and top.get("enabled") is False) or (
            isinstance(section, Mapping) and section.get("enabled") is False
        )
        return off or not value or value in ("none", AUTO) or str(value) == key.neutral

    def notes(self) -> list[str]:
        """One sentence for each reason."""
        return [f"no effect: {', '.join(paths)} ({reason})" for reason, paths in self.ignored.items()]

    def get(self, path: str, default: Any) -> Any:
        """Value of a dotted path; null and ``"auto"`` (already a fault) count as absent."""
        value: Any = self.values
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def number(self, path: str, default: float) -> float:
        """A number >= 0."""
        value = self.get(path, default)
        if not NUMBER.accepts(value):
            self.faults.append(f"{path}={quoted(value)} must be {NUMBER.description}")
            return default
        return value

    def integer(self, path: str, default: int, least: int) -> int:
        """An integer >= ``least``; 5e8 is one."""
        value = self.get(path, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not whole(least)(value):
            self.faults.append(f"{path}={quoted(value)} must be an integer >= {least}")
            return default
        return value

    def flag(self, path: str) -> bool:
        """True or false."""
        value = self.get(path, False)
        if not isinstance(value, bool):
            self.faults.append(f"{path}={quoted(value)} must be true or false")
        return value is True

    def check_types(self) -> None:
        """Check the values that the engine reads itself."""
        for path in FLAGS:
            self.flag(path)
        every = self.get("steps_per_print", 1)
        if every != float("inf"):  # which accelerate sets for no lines at all
            self.integer("steps_per_print", 1, 0)

    def batch(self, ranks: int) -> tuple[int, int, int]:
        """Batch, micro-batch and accumulation steps; absent ones follow from the others, as in DeepSpeed."""
        given = [self.integer(name, 1, 1) if self.get(name, None) is not None else None for name in TRIPLE]
        batch, micro, steps = given
        if batch is None and micro is None:
            self.faults.append(f"{TRIPLE[0]} or {TRIPLE[1]} must be given")
            return 1, 1, 1
        if batch is None:
            assert micro is not None
            return micro * (steps or 1) * ranks, micro, steps or 1
        if micro is None:
            micro = batch // ranks // (steps or 1)
            steps = steps or 1
        elif steps is None:
            steps = batch // micro // ranks
        if batch != micro * steps * ranks:
            shown = ", ".join(f"{name}={value}" for name, value in zip(TRIPLE, given, strict=True) if value is not None)
            self.faults.append(
                f"{shown} on {ranks} ranks contradict: {TRIPLE[0]} must be {TRIPLE[1]} x {TRIPLE[2]} x ranks; "
                "correct or omit one of them"
            )
        return batch, micro, steps

    def precision(self) -> dict[str, Any]:
        """Settings of fp16, bf16 and the dtype of communication."""
        fp16, bf16 = self.flag("fp16.enabled"), self.flag("bf16.enabled") or self.flag("bfloat16.enabled")
        if fp16 and bf16:
            self.faults.append("fp16.enabled and bf16.enabled contradict; enable one of them")
        found: dict[str, Any] = {"fp16": fp16, "bf16": bf16}
        sent = self.get("communication_data_type", None)
        if sent in ("bf16", "bfp16"):
            found["grad_reduce_in_bf16"] = True
        elif sent not in (None, "fp32"):
            self.faults.append(f"communication_data_type={quoted(sent)} is not supported: use 'fp32' or 'bf16'")
        if not fp16:
            return found
        if constant := self.number("fp16.loss_scale", 0):
            return {**found, "loss_scale": float(constant)}
        return {
            **found,
            "initial_loss_scale": 2.0 ** min(self.integer("fp16.initial_scale_power", 16, 0), 1000),
            "loss_scale_window": self.integer("fp16.loss_scale_window", 1000, 1),
            "hysteresis": self.integer("fp16.hysteresis", 2, 1),
            "min_loss_scale": float(self.number("fp16.min_loss_scale", 1)),
        }

    def zero(self, ranks: int) -> dict[str, Any]:
        """Settings of ``zero_optimization``."""
        name = "zero_optimization"
        stage = self.integer(f"{name}.stage", 0, 0)
        if stage > 3:
            self.faults.append(f"{name}.stage={stage} must be 0, 1, 2 or 3")
        found: dict[str, Any] = {"zero_stage": stage}
        size = self.integer(f"{name}.reduce_bucket_size", 500_000_000, 1)
        overlaps = self.flag(f"{name}.overlap_comm")
        if ranks > 1:
            found |= {"ddp_bucket_size": size, "overlap_grad_reduce": overlaps}
        return found | self._offload_optimizer(stage) | self._offload_param(stage)

    def _offload_optimizer(self, stage: int) -> dict[str, Any]:
        device = self._device("offload_optimizer", "nvme", "cpu")
        if device == "none":
            return {}
        if not stage:
            self.faults.append("zero_optimization.offload_optimizer needs zero_optimization.stage 1, 2 or 3")
        if device == "nvme":
            return {"optimizer_offload_dir": self._folder("offload_optimizer")}
        ratio = self.number("zero_optimization.offload_optimizer.ratio", 1.0)
        if not 0 < ratio <= 1:
            self.faults.append(f"zero_optimization.offload_optimizer.ratio={ratio} must be above 0 and at most 1")
        return {"optimizer_cpu_offload": True} | ({"optimizer_offload_fraction": float(ratio)} if ratio != 1 else {})

    def _offload_param(self, stage: int) -> dict[str, Any]:
        device = self._device("offload_param", "nvme", "cpu")
        if device == "none":
            return {}
        if stage != 3:  # no effect in DeepSpeed either; accelerate's launcher asks for both
            self.ignored["weights are in shards at zero_optimization.stage 3 only"] = [
                "zero_optimization.offload_param"
            ]
            return {}
        if device == "cpu":
            return {"zero3_param_cpu_offload": True}
        return {"zero3_param_offload_dir": self._folder("offload_param")}

    def _device(self, section: str, *known: str) -> str:
        device = self.get(f"zero_optimization.{section}.device", "none")
        if device not in ("none", *known):
            self.faults.append(f"zero_optimization.{section}.device={quoted(device)} must be one of none, cpu and nvme")
            return "none"
        return str(device)

    def _folder(self, section: str) -> str | None:
        path = self.get(f"zero_optimization.{section}.nvme_path", None)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            self.faults.append(f"zero_optimization.{section}.device='nvme' needs nvme_path, the name of a folder")
            return None
        return os.fspath(path)

    def algorithm(self, section: str) -> Algorithm | None:
        """Type and params of ``optimizer`` or ``scheduler``."""
        name, params = self.get(f"{section}.type", None), self.get(f"{section}.params", {})
        if not isinstance(params, Mapping):
            self.faults.append(f"{section}.params={quoted(params)} must be an object {{...}}")
            params = {}
        if name is not None and not isinstance(name, str):
            self.faults.append(f"{section}.type={quoted(name)} must be a name")
        if name is None and params:
            self.faults.append(f"{section}.params is given without {section}.type; add the type")
        return None if name is None else Algorithm(str(name), dict(params))


def find_key(path: str) -> Key | None:
    """Return the row of a dotted path, or of a section around it; None for an unknown key."""
    table = known_keys()
    parts = path.split(".")
    above = (f"{'.'.join(parts[:count])}.*" for count in range(len(parts), 0, -1))
    return next((table[each] for each in (path, *above) if each in table), None)


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted paths with their values, without sections that are null."""
    for name, value in values.items():
        path = f"{above}{name}"
        is_section = any(each.startswith(f"{path}.") for each in known_keys())
        if isinstance(value, Mapping) and (is_section or f"{above}*" in known_keys() or find_key(path)):
            yield from _leaves(value, f"{path}.")
        elif not (is_section and value is None):
            yield path, value


def _enabled(value: Any) -> bool:
    """Whether a section, or any section below it, has ``"enabled": true``."""
    return isinstance(value, Mapping) and (value.get("enabled") is True or any(map(_enabled, value.values())))


def key_names() -> list[str]:
    """All known dotted paths and their sections."""
    paths = [each.removesuffix(".*").split(".") for each in known_keys()]
    return sorted({".".join(parts[:count]) for parts in paths for count in range(1, len(parts) + 1)})
