"""An older checkpoint in place of one that turns out to be damaged while it is loaded into a built model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_core import parallel_state
from megatron_core.checkpoint import one_pass
from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.training.state import open_checkpoint
from tests.checkpoint.runs import save_run, start, train
from tests.checkpoint.test_damage import ONE_LAYER

NAME = "rank_00000.safetensors"
UNHASHED = ONE_LAYER | {"verify_checkpoint": False}
LOCAL = {"non_persistent_save_interval": 1, "non_persistent_ckpt_type": "local"}


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def _save(folder: Path, steps: int = 1, **settings: object) -> None:
    run = start(ONE_LAYER | {"save": str(folder), "load": str(folder)} | settings)
    for _ in range(steps):
        train(run, 1)
        save_run(run)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def test_a_damaged_checkpoint_is_opened_once_with_copies_in_memory(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    local = LOCAL | {"non_persistent_local_ckpt_dir": str(tmp_path / "host")}
    disk = tmp_path / "disk"
    _save(disk, 2)
    _truncate(disk / "iter_0000002" / NAME)
    assert start(UNHASHED | local | {"save": str(disk), "load": str(disk)}).state.iteration == 1
    _truncate(disk / "iter_0000001" / NAME)
    with pytest.raises(CheckpointError, match=r"has no intact checkpoint: .*it is truncated"):
        start(UNHASHED | local | {"save": str(disk), "load": str(disk)})


def test_a_checkpoint_that_is_found_damaged_again_is_an_error(tmp_path: Path) -> None:
    """Even if it were opened again, the loop would end."""
    _save(tmp_path)
    _truncate(tmp_path / "iter_0000001" / NAME)
    opened = open_checkpoint

    def forgetful(config: RunConfig, device: torch.device, **_: object) -> object:
        return opened(config, device, hash_later=True)

    with (
        mock.patch("megatron_core.training.loading.open_checkpoint", forgetful),
        pytest.raises(CheckpointError, match="it is truncated"),
    ):
        start(UNHASHED | {"load": str(tmp_path)})


def test_settings_of_the_older_checkpoint_need_another_model(tmp_path: Path) -> None:
    """The error says how to load it."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    _save(folder, 2, norm_epsilon=1e-3)
    _save(other)
    shutil.rmtree(folder / "iter_0000001")
    shutil.move(other / "iter_0000001", folder)
    _truncate(folder / "iter_0000002" / NAME)
    settings = UNHASHED | {"load": str(folder), "use_checkpoint_args": True, "norm_epsilon": 1e-3}
    with pytest.raises(CheckpointError, match=r"truncated; .*: norm_epsilon; to load it, give --ckpt-step 1$"):
        start(settings)
    assert start(settings | {"norm_epsilon": 1e-5, "ckpt_step": 1}).state.iteration == 1


def test_a_folder_that_is_gone_is_no_new_start(tmp_path: Path) -> None:
    _save(tmp_path)
    _truncate(tmp_path / "iter_0000001" / NAME)
    raised = one_pass.OnePass._raise

    def gone(self: one_pass.OnePass, faults: list[str]) -> None:
        if faults:
            shutil.rmtree(tmp_path)
        raised(self, faults)

    with (
        mock.patch.object(one_pass.OnePass, "_raise", gone),
        pytest.raises(CheckpointError, match=r"it is truncated; load=.* holds no other checkpoint"),
    ):
        start(UNHASHED | {"load": str(tmp_path)})
