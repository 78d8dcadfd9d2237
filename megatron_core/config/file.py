"""A configuration as a file: YAML or JSON, flat or nested by section."""

import typing
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_core.config.flags import Spellings, spellings_of_features
from megatron_core.config.run import RunConfig, field_types, section_types
from megatron_core.config.values import convert, describe_type, perhaps
from megatron_core.errors import MOST_SHOWN, ConfigError, quoted, shortened
from megatron_core.output_file import Output, starting_with
from megatron_core.text_file import parse_json, parse_yaml, read_text

FORMER_SECTIONS = "outer", "tuning"
"""Sections in files of earlier versions, whose settings are in other sections now."""
_HEADER = "# The settings of a run"
WRITTEN = starting_with("configuration that a run wrote", _HEADER.encode())
"""Files of ``write_config``."""


def read_config(path: str | Path, defaults: RunConfig | None = None) -> RunConfig:
    """The configuration in a file, as ``config_and_faults``; one ``ConfigError`` for all faults."""
    config, faults = config_and_faults(path, defaults)
    _raise_together(faults, path)
    return config


def config_and_faults(
    path: str | Path, defaults: RunConfig | None = None, overridden: Collection[str] = ()
) -> tuple[RunConfig, list[str]]:
    """The configuration in a file; settings that are not in the file come from ``defaults``. Those among ``overridden``
    imply no further settings.

    Names are those of the fields, with underscores or hyphens, at the top level or under their section
    (``model``, ``parallel``, ``training``, ``optimizer``, ``data``, ``checkpoint``, ``monitor``). Each unknown name,
    name given twice and value of the wrong type gives a message, and its setting has its default.
    ``ConfigError``: the file cannot be read.
    """
    values, faults = settings_and_faults(path)
    for setting in [name for name in values if name not in overridden]:
        text = values[setting]
        for spelling in spellings_of_features():
            values[setting], implied = spelling.implied(setting, values[setting])
            for name, value in implied.items():
                if values.setdefault(name, value) != value:
                    faults.append(
                        f"{setting}={text} in {path} means {name}={value}, but {name}={values[name]}; remove one of "
                        "them"
                    )
    return RunConfig.from_flat((defaults or RunConfig()).flat() | values), faults


def read_settings_file(path: str | Path, *, flag: str = "--config") -> dict[str, Any]:
    """The settings in a file by name; ``flag`` is the setting that names the file.

    Errors: one ``ConfigError`` for all faults.
    """
    values, faults = settings_and_faults(path, flag)
    _raise_together(faults, path)
    return values


def settings_and_faults(path: str | Path, flag: str = "--config") -> tuple[dict[str, Any], list[str]]:
    """The settings in a file by name, and a message for each that cannot be used; see ``config_and_faults``."""
    values: dict[str, Any] = {}
    kinds, faults = field_types(), list[str]()
    spellings = spellings_of_features()
    for name, value in _flat_items(_load(Path(path), flag), str(path), faults):
        try:
            for spelling in spellings:
                name, value = spelling.entry(name, value)
            if name not in kinds:
                raise ConfigError(_unknown(name, str(path), kinds, spellings))
            if name in values:
                raise ConfigError(f"{name} occurs twice in {path}; keep one of the two")
            values[name] = _checked(name, value, kinds[name], str(path))
        except ConfigError as error:
            faults.append(str(error))
    return values, faults


def _raise_together(faults: list[str], path: str | Path) -> None:
    """Raise one ``ConfigError`` for all ``faults`` of a file, if there are any."""
    if len(faults) == 1:
        raise ConfigError(faults[0])
    if faults:
        lines = [f"  {number}. {fault}" for number, fault in enumerate(faults, 1)]
        raise ConfigError("\n".join([f"{len(faults)} settings of {path} cannot be used:", *lines]))


def names_in(path: str | Path) -> set[str]:
    """The names of the settings in a file that are not null; a switch that is off is ``no_x``."""
    values = dict(_flat_items(_load(Path(path)), str(path), []))
    return {f"no_{name}" if value is False else name for name, value in values.items() if value is not None}


def write_config(
    config: RunConfig, path: str | Path, named: str = "the configuration is not written", *, changed_only: bool = False
) -> None:
    """Write ``config`` as YAML by section; ``--config`` reads an equal configuration from it. ``changed_only``: without
    settings that have their default.

    Errors: ``ConfigError`` that begins with ``named`` if the file was not written by this function.
    """
    sections = {name: asdict(section) for name, section in config.sections().items()}
    text = changed_settings(config) if changed_only else yaml.safe_dump(sections, sort_keys=False)
    Output(named, Path(path), WRITTEN).write(f"{_HEADER}; --config FILE uses them again.\n{text}")


def changed_settings(config: RunConfig) -> str:
    """The settings that differ from their defaults, as YAML by section."""
    sections = {
        name: {key: value for key, value in asdict(section).items() if value != getattr(default, key)}
        for (name, section), default in zip(config.sections().items(), RunConfig().sections().values(), strict=True)
    }
    lists = {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}
        for name, section in sections.items()
        if section
    }
    return str(yaml.safe_dump(lists, sort_keys=False)) if lists else ""


def _load(path: Path, flag: str = "--config") -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{flag} {path} cannot be read: {reason}; give a YAML or JSON file") from error
    try:
        loaded = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        language = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"{flag} {path} is not valid {language}: {shortened(str(error))}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{flag} {path} holds a {type(loaded).__name__}; write 'name: value' lines")
    return loaded


def _flat_items(loaded: dict[str, Any], path: str, faults: list[str]) -> typing.Iterator[tuple[str, Any]]:
    """The (name, value) pairs of a file, including those inside sections; a section with a value is a fault."""
    sections = section_types()
    for key, value in loaded.items():
        name = _plain(key)
        # A section may have the name of a setting, such as `optimizer`; only a mapping is the section.
        is_setting = name in field_types() and value is not None and not isinstance(value, dict)
        if is_setting or not (name in sections or name in FORMER_SECTIONS):
            yield name, value
        elif isinstance(value, dict):
            yield from ((_plain(inner), item) for inner, item in value.items())
        elif value is not None:
            faults.append(
                f"{name}={quoted(value)} in {path}: {name} is a section; write its settings indented below it"
            )


def _plain(key: object) -> str:
    """A key as a field's name."""
    return (key if isinstance(key, str) else quoted(key)).lstrip("-").replace("-", "_")


def _unknown(name: str, path: str, kinds: dict[str, Any], spellings: Iterable[Spellings]) -> str:
    """The message for a name that is not a setting."""
    for spelling in spellings:
        explanation = spelling.explain(name)
        if explanation is not None:
            return f"{explanation[0]} {name} in {path} is not a setting here: {explanation[1]}"
    in_one_line = name.replace("\n", "\\n")
    return f"{in_one_line} in {path} is not a setting; {perhaps(name[:MOST_SHOWN], kinds)}"


def _checked(name: str, value: Any, setting_type: Any, path: str) -> Any:
    """``value`` converted to the field's type; ``ConfigError`` if it does not fit."""
    try:
        return convert(value, setting_type)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{name}={quoted(value)} in {path} does not fit; legal: {describe_type(setting_type)}"
        ) from None
