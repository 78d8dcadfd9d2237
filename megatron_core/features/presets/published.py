"""Published models by name: ``--model-preset llama3-8b`` gives the settings of their shape, see ``published.yaml``."""

import difflib
from collections.abc import Collection
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.text_file import read_table

Settings = dict[str, Any]

_TABLES: dict[str, dict[str, Settings]] = {
    table: {
        name: {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        for name, settings in entries.items()
    }
    for table, entries in read_table(__file__).items()
}
LAYERS = _TABLES["layers"]
"""Settings of the layers of model families, by their names."""
PRESETS = _TABLES["models"]
"""Settings by the name of the model."""


def read_preset(name: str, names: Collection[str]) -> tuple[Settings, str]:
    """The settings of a published model, without a note. Errors: ``ConfigError`` if ``names`` has --depth, too."""
    if "depth" in names:
        raise ConfigError(f"model_preset={name} and depth both choose the model; remove one of them")
    return preset(name), ""


def preset(name: str) -> Settings:
    """The settings of a published model. Errors: ``ConfigError`` with similar names for one that is not here."""
    if name in PRESETS:
        return PRESETS[name]
    # All names need more than two lines.
    close = difflib.get_close_matches(name.lower(), PRESETS, n=6, cutoff=0.4)
    families = dict.fromkeys(known.partition("-")[0] for known in PRESETS)
    fix = f"perhaps you meant {', '.join(close)}" if close else f"names begin with {', '.join(families)}"
    raise ConfigError(f"model_preset={name!r} is not known; {fix}")
