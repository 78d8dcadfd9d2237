"""Translate a JSON configuration of DeepSpeed into a YAML file of settings, or back.

megatron-deepspeed-config --from-json ds_config.json --world-size 8 --output settings.yaml

megatron-deepspeed-config --from-yaml settings.yaml --output ds_config.json
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("deepspeed_config")

import json
import sys
from dataclasses import dataclass

import yaml

import megatron_core.drop_in  # noqa: F401 - puts the folder of the package deepspeed on sys.path
from megatron_core.config import RunConfig
from megatron_core.config.file import read_settings_file
from megatron_core.config.run import field_types
from megatron_core.errors import ConfigError
from megatron_core.output_file import Kind
from megatron_core.prepared_output import prepare_output
from megatron_core.shell.unknown import UNKNOWN
from megatron_core.terminal import parse_flags
from megatron_core.text_file import parse_json

OF_FLAGS = ("micro_batch_size", "global_batch_size")
"""Settings that Megatron-DeepSpeed reads from its flags: its loop gives DeepSpeed their batch size at each step."""
HEAD = """# Keys of DeepSpeed's JSON

All keys of DeepSpeed 0.19.8's configuration are known by name; an unknown key is an error with the nearest known one.
This page is printed by `megatron-deepspeed-config --page`. Check a configuration,
on any machine, by

    megatron-deepspeed-config --from-json ds_config.json --world-size N

`section.*` means all keys of a section. transformers.Trainer and accelerate fill `"auto"`; a remaining one
is the default in `zero_optimization`, as in DeepSpeed, and an error elsewhere.
"""


@dataclass(frozen=True, kw_only=True)
class DeepspeedConfigFlags:
    """Translate a JSON configuration of DeepSpeed into a YAML file of settings, or back."""

    from_json: str | None = None
    """JSON file of DeepSpeed; print the settings as YAML, and the keys without effect on standard error."""
    from_yaml: str | None = None
    """YAML file of settings, also config.yaml of a run; print the JSON of DeepSpeed, and the settings without a key in
    it on standard error."""
    world_size: int = 1
    """With --from-json: number of data-parallel ranks."""
    output: str | None = None
    """Write to this file instead of standard output; an existing file with other content is not overwritten."""
    page: bool = False
    """Print docs/deepspeed_keys.md."""


def main() -> None:
    """Run the command."""
    settings = parse_flags(DeepspeedConfigFlags)
    if sum((settings.from_json is not None, settings.from_yaml is not None, settings.page)) != 1:
        raise ConfigError("give one of --from-json, --from-yaml and --page")
    if settings.world_size < 1:
        raise ConfigError(f"--world-size {settings.world_size} must be an integer >= 1")
    if settings.page:
        text = key_page()
    elif settings.from_yaml is not None:
        text = from_yaml(settings.from_yaml)
    else:
        text = translate_json(settings)
    if settings.output is None:
        print(text, end="")
        return
    # Files of other programs have the same format, so that only equal content may be replaced.
    same = Kind("file with the same settings", lambda data: data == text.encode())
    output = prepare_output(settings, "output", same)
    try:
        output.write(text)
    except OSError as error:
        raise ConfigError(f"--output {settings.output}: cannot be written ({error.strerror})") from error


def translate_json(settings: DeepspeedConfigFlags) -> str:
    """The settings of a JSON file, as YAML."""
    from deepspeed.translation import translate  # loads torch, which --help does not need

    translated = translate(str(settings.from_json), settings.world_size)
    for note in translated.notes:
        print(note, file=sys.stderr)
    if translated.optimizer_class is not None:
        print(
            f"optimizer torch.optim.{translated.optimizer_class} is not a setting: construct it with "
            f"{translated.optimizer_params} and pass it as optimizer",
            file=sys.stderr,
        )
    if translated.scheduler is not None:
        print(
            f"scheduler {translated.scheduler.name} is not a setting: construct it from "
            "deepspeed.runtime.lr_schedules and pass it as lr_scheduler",
            file=sys.stderr,
        )
    return str(yaml.safe_dump(translated.settings, sort_keys=False))


def with_deepspeed(config: RunConfig, text: str, world_size: int) -> tuple[RunConfig, str]:
    """``config`` with the settings in the JSON of a launch of Megatron-DeepSpeed, and a text that names them.

    They override those of flags, but flags select optimizer, schedule and batch sizes, as in Megatron-DeepSpeed. Raises
    ConfigError for a JSON that cannot be used, and for one that contradicts these flags.
    """
    from deepspeed.translation import translate

    if names := UNKNOWN.findall(text):
        raise ConfigError(f"values of {', '.join(dict.fromkeys(names))} are not known; give --set {names[0]}=VALUE")
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError("it must be an object, { ... }")
    if values.get("scheduler"):
        raise ConfigError(
            "scheduler: DeepSpeed until 0.16 uses it instead of --lr-decay-style, later ones do not; remove it"
        )
    other_values = {name: value for name, value in values.items() if name not in ("optimizer", "scheduler")}
    translated = translate(other_values, config.parallel.data_parallel_size(world_size))
    micro = translated.train_micro_batch_size_per_gpu
    size = config.training.micro_batch_size
    if micro != size:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu={micro} differs from --micro-batch-size {size}; use one value"
        )
    allowed = field_types().keys() - set(OF_FLAGS)
    settings = {name: value for name, value in translated.settings.items() if name in allowed}
    ignored = [f"{name}: the flags select it" for name in ("optimizer", "train_batch_size") if name in values]
    told = ", ".join(f"{name}={value}" for name, value in settings.items())
    return RunConfig.from_flat(config.flat() | settings), "; ".join([told, *ignored, *translated.notes])


def from_yaml(name: str) -> str:
    """The JSON of a YAML file of settings, flat or by section; settings without a key are printed on standard error."""
    from deepspeed.reverse import of_run, to_deepspeed

    translated, left = to_deepspeed(of_run(read_settings_file(name, flag="--from-yaml")))
    if left:
        unwritten = ", ".join(f"{setting}={value!r}" for setting, value in left.items())
        print(f"not written, because DeepSpeed's JSON has no key: {unwritten}", file=sys.stderr)
    return json.dumps(translated, indent=2) + "\n"


def key_page() -> str:
    """The page of all keys, in Markdown."""
    from deepspeed.key_table import known_keys

    lines = [HEAD]
    titles = {"translated": ("Translated", "setting"), "without_effect": ("Without effect", "reason")}
    for use, (title, column) in {**titles, "refused": ("Refused", "fix")}.items():
        rows: dict[str, list[str]] = {}
        for path, key in known_keys().items():
            if key.use == use:
                rows.setdefault(key.text, []).append(f"`{path}`")
        lines += [f"## {title}\n", f"| keys | {column} |", "|---|---|"]
        lines += [f"| {' '.join(sorted(paths))} | {text} |" for text, paths in rows.items()]
        lines.append("")
    lines.append("A refused key is accepted with its default value, or in a section with `enabled: false`.")
    return "\n".join(lines) + "\n"
