"""Rules for single settings: ranges, and settings that have no effect without another one."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields

from megatron_core.config.model import LatentAttentionConfig, MuPConfig
from megatron_core.config.moe import MoEConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.tables import read_table

LEGAL: dict[str, Callable[[float], bool]] = {
    "1, 2, 3, ...": lambda x: x >= 1,
    "0, 1, 2, ...": lambda x: x >= 0,
    "a finite number above 0": lambda x: 0 < x < math.inf,
    "0 or a finite number above it": lambda x: 0 <= x < math.inf,
    "from 0 up to, not including, 1": lambda x: 0 <= x < 1,
    "above 0 and up to 1": lambda x: 0 < x <= 1,
    "0 to 1": lambda x: 0 <= x <= 1,
    "up to 126": lambda x: x <= 126,
    "up to 65,536": lambda x: x <= 2**16,
    "up to 2,147,483,647": lambda x: x < 2**31,
    "up to 1,000,000": lambda x: x <= 10**6,
    "up to 3e38, as float32 goes": lambda x: x <= 3e38,
}
"""Ranges by their words, with which ``rules_ranges.yaml`` lists the settings."""

_TABLES: dict[str, dict[str, str]] = read_table(__file__)
RANGES = _TABLES["ranges"]
"""Words for a range -> the settings that lie in it."""
NEEDS = {
    "--num-experts N": " ".join(part.name for part in fields(MoEConfig)),
    "--use-mup": " ".join(part.name for part in fields(MuPConfig)),
    "--multi-latent-attention": " ".join(part.name for part in fields(LatentAttentionConfig)),
} | _TABLES["needs"]
"""A flag -> the settings that have no effect without it."""


def range_problems(config: RunConfig) -> Iterator[str]:
    """Settings whose value is out of range, independent of other settings."""
    values, found = config.flat(), dict[str, str]()
    least = "0 or a finite number above it"
    if config.training.skip_train:
        rates = [("lr", LEGAL[least], least)]
    else:
        rates = [("lr", lambda x: 0 < x < math.inf, "a finite number above 0 (0 with --skip-train)")]
    for names, is_legal, legal in (*rates, *((names, LEGAL[legal], legal) for legal, names in RANGES.items())):
        for name in names.split():
            if name not in found and values[name] is not None and not is_legal(values[name]):
                found[name] = f"{name}={values[name]} is out of range; legal: {legal}"
    yield from found.values()
    for name, value in values.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not _is_encodable(text):
                yield f"{name}={text!r} has a character that no file's name and no flag can have; remove it"


def _is_encodable(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON or YAML file
        return False


def unused_problems(config: RunConfig) -> Iterator[str]:
    """Settings that differ from their defaults and have no effect, each once."""
    values, defaults, reported = config.flat(), RunConfig().flat(), set[str]()
    for flag, names in NEEDS.items():
        needed = flag.split()[0][2:].replace("-", "_")
        for name in names.split():
            if not values[needed] and values[name] != defaults[name] and name not in {needed, *reported}:
                reported.add(name)
                yield f"{name}={shown(values[name])} has no effect without {needed}; add {flag} or remove it"


def unused(setting: str, value: object, other: str, is_now: object, way_out: str) -> str:
    """The message for a setting that another one's value leaves without effect."""
    return f"{setting}={value} has no effect with {other}={is_now}; {way_out}"


def exclusive(*settings: str) -> str:
    """The message for settings, each with its value, of which one alone may be given."""
    return f"{' and '.join(settings)} exclude one another; keep one of them"


def shown(value: object) -> str:
    """A value as on the command line."""
    return " ".join(value) if isinstance(value, tuple) and all(isinstance(part, str) for part in value) else str(value)
