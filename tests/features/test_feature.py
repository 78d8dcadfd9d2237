"""The mechanism of features: sections of settings, rules, parts of a run, and a package without one of its features."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import megatron_core
from megatron_core import feature
from megatron_core.config import RunConfig, TrainingConfig
from megatron_core.config.cli import parse_run_config, write_config
from megatron_core.config.run import feature_sections, settings
from megatron_core.config.setting import section, setting
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.feature import Feature, extends, features, register_feature
from megatron_core.parallel import World
from megatron_core.training.callbacks import Callback
from megatron_core.training.loop import train
from megatron_core.training.parts import RunPart
from megatron_core.training.pretrain import pretrain
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult, train_step
from tests.runs import TINY, tiny_config, tiny_run

PACKAGE = Path(megatron_core.__file__).parent
NAMES = [path.parent.name for path in sorted((PACKAGE / "features").glob("*/__init__.py"))]
SATELLITES = ("cpu_ranks", "hub", "reports", "resilience", "storage", "vocabularies")
"""Packages outside of ``features`` that register features."""
DEPENDENTS = {"batch_growth": {"length_warmup"}}
"""Features whose settings need another one: a ramp of lengths is one of batches. They are removed with it."""
IMPORTED = ("cpu_ranks", "reports")
"""Satellites that another one, ``resilience``, imports: their registrations are removed, and their folders stay."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@section()
class NoiseConfig:
    """Add noise to the rate of learning."""

    noise_scale: float = setting(0.0)
    """Size of the noise."""


class CountSteps(RunPart):
    """Counts the steps of a run."""

    def __init__(self, run: Run) -> None:
        self.steps = 0
        self.scale = run.config.section(NoiseConfig).noise_scale

    def before_step(self) -> None:
        self.steps += 1

    def metrics(self) -> dict[str, float]:
        return {"noise": self.scale * self.steps}


class RecordSteps(Callback):
    """Records the iterations of a run."""

    iterations: ClassVar[list[int]] = []

    def __init__(self, run: Run) -> None:
        self.run = run

    def after_step(self, result: StepResult) -> None:
        self.iterations.append(self.run.state.iteration)


def noise_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """The rule of the feature below."""
    if config.section(NoiseConfig).noise_scale < 0:
        yield f"noise_scale is below 0 on {world_size} ranks; use --noise-scale 0"


NOISE = Feature(
    name="noise",
    settings=NoiseConfig,
    is_used=lambda config: config.section(NoiseConfig).noise_scale != 0,
    problems=noise_problems,
    run_part=f"{__name__}:CountSteps",
    callbacks=(f"{__name__}:RecordSteps",),
)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature of a program, for one test."""
    monkeypatch.setattr(feature, "_ADDED", {})
    register_feature(NOISE)


def test_a_feature_is_named_once() -> None:
    kinds = [feature.settings for feature in features() if feature.settings is not None]
    assert [kind for kind in kinds if not extends(kind)] == [*feature_sections().values()]
    own_folder = [feature.name for feature in features() if (PACKAGE / "features" / feature.name).is_dir()]
    assert sorted(own_folder) == NAMES


def test_settings_of_features_have_names_of_their_own() -> None:
    names = [
        name for kind in feature_sections().values() for name in (field.name for field in dataclasses.fields(kind))
    ]
    assert set(names) <= set(settings()) and len(RunConfig().flat()) == len(settings())


@pytest.mark.usefixtures("noise")
def test_flags_files_and_rules_of_a_program_s_feature(tmp_path: Path) -> None:
    config = parse_run_config(["--noise-scale", "0.5"])
    assert config.section(NoiseConfig).noise_scale == 0.5 and config.value("noise_scale") == 0.5
    write_config(config, tmp_path / "run.yaml")
    assert parse_run_config(["--config", str(tmp_path / "run.yaml")]) == config
    assert RunConfig.from_flat(config.flat()) == config
    with pytest.raises(ConfigError, match="noise_scale is below 0 on 2 ranks; use --noise-scale 0"):
        check(tiny_config(noise_scale=-1.0), 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
@section()
class ExitConfig(TrainingConfig):
    """Layers that end early."""

    exit_layers: int = setting(0)
    """Number of layers with an exit."""

    def final_batch_size(self, data_parallel_size: int) -> int:
        return super().final_batch_size(data_parallel_size) + self.exit_layers


def test_a_feature_adds_settings_to_a_section_of_the_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(feature, "_ADDED", {})
    before = TrainingConfig(global_batch_size=4)
    register_feature(Feature(name="exits", settings=ExitConfig, is_used=lambda config: False))
    assert before.section(ExitConfig) == TrainingConfig(global_batch_size=4)
    config = parse_run_config(["--exit-layers", "2", "--global-batch-size", "4"])
    assert config.section(ExitConfig) is config.training and config.training.exit_layers == 2
    assert config.training.final_batch_size(1) == 6
    write_config(config, tmp_path / "run.yaml")
    assert "exit_layers: 2" in (tmp_path / "run.yaml").read_text() and "exits" not in config.sections()
    assert parse_run_config(["--config", str(tmp_path / "run.yaml")]) == config
    assert RunConfig.from_flat(config.flat()) == config == pickle.loads(pickle.dumps(config))
    other = dataclasses.replace(config.training, exit_layers=3)
    assert config.with_section(other).value("exit_layers") == 3 and other != config.training
    with pytest.raises(ConfigError, match="has the settings exit_layers of feature 'exits'; rename them"):
        register_feature(Feature(name="other", settings=ExitConfig, is_used=lambda config: False))


@pytest.mark.usefixtures("noise")
def test_a_part_sees_every_step_and_reports_metrics() -> None:
    run = tiny_run(noise_scale=0.25)
    assert [train_step(run).breakdown["noise"] for _ in range(3)] == [0.25, 0.5, 0.75]
    assert tiny_run().part(CountSteps) is None


@pytest.mark.usefixtures("noise")
def test_callbacks_are_called_in_runs_that_use_the_feature() -> None:
    RecordSteps.iterations.clear()
    train(tiny_run(train_iters=2), [])
    assert RecordSteps.iterations == []
    train(tiny_run(train_iters=2, noise_scale=0.25), [])
    assert RecordSteps.iterations == [1, 2]


@pytest.mark.usefixtures("noise")
def test_a_setting_belongs_to_one_feature() -> None:
    with pytest.raises(ConfigError, match="feature 'noise' is already registered"):
        register_feature(NOISE)
    with pytest.raises(ConfigError, match="has the settings noise_scale of feature 'noise'; rename them"):
        register_feature(dataclasses.replace(NOISE, name="other"))


def test_only_one_feature_defines_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "_ADDED", {})
    for name in ("first", "second"):
        register_feature(
            Feature(name=name, is_used=lambda config: True, objective="megatron_core.training.objective:Objective")
        )
    with pytest.raises(ConfigError, match="the features first, second each replace the loss; use only one of them"):
        tiny_run()


def test_only_one_feature_starts_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "_ADDED", {})
    for name in ("first", "second"):
        register_feature(
            Feature(name=name, is_used=lambda config: True, start="megatron_core.training.pretrain:start_once")
        )
    world = World(0, 1, local_rank=0, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="the features first, second each start the training; use only one of them"):
        pretrain(tiny_config(), world)
    with pytest.raises(ConfigError, match="recover=in-process and elastic=True exclude one another"):
        pretrain(tiny_config(recover="in-process", elastic=True), world)


WITHOUT = """
from pathlib import Path
import megatron_core.features
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.pretrain import pretrain
import torch
names = {feature.name for feature in megatron_core.features.FEATURES}
assert len(names) > 20 and not names & set(REMOVED)
assert "/without/" in megatron_core.features.__file__
for steps in (2, 3):
    settings = SETTINGS | {"save": FOLDER, "load": FOLDER, "train_iters": steps, "exit_interval": steps}
    pretrain(RunConfig.from_flat(settings), World(0, 1, local_rank=0, device=torch.device("cpu")))
"""


@pytest.mark.parametrize("name", [*NAMES, *SATELLITES])
def test_a_package_without_a_feature_or_satellite_trains_saves_and_resumes(name: str, tmp_path: Path) -> None:
    package = tmp_path / "without" / "megatron_core"
    (package / "features").mkdir(parents=True)
    names = {name} | DEPENDENTS.get(name, set())
    removed_folders = set() if name in IMPORTED else names
    for folder, target in ((PACKAGE, package), (PACKAGE / "features", package / "features")):
        for entry in folder.iterdir():
            if (
                entry.name not in {*removed_folders, "features", "__pycache__"}
                and entry != PACKAGE / "features" / "__init__.py"
            ):
                (target / entry.name).symlink_to(entry)
    listed = (PACKAGE / "features" / "__init__.py").read_text()
    if name in SATELLITES:
        removed = {feature.name for feature in import_module(f"megatron_core.{name}").FEATURES}
        listed = re.sub(rf"    \*{name}\.FEATURES,\n|(?<=import ){name}, |, {name}(?=\n|, )", "", listed)
    else:
        removed = names
        for feature in names:
            added = re.search(rf"^from megatron_core\.features\.{feature} import (\w+)\n", listed, re.MULTILINE)
            assert added is not None
            listed = re.sub(rf"{re.escape(added[0])}|    {added[1]},\n", "", listed)
    (package / "features" / "__init__.py").write_text(listed)
    values = {"REMOVED": removed, "SETTINGS": TINY, "FOLDER": str(tmp_path / "saved")}
    program = "\n".join([*(f"{key} = {value!r}" for key, value in values.items()), WITHOUT])
    variables = os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming from iteration 2" in done.stdout
