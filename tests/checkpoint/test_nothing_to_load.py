"""A --load without a checkpoint starts a run from scratch only if it is the folder of --save."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from safetensors.torch import save_file

from megatron_core.commands.convert_checkpoint import ConvertFlags
from megatron_core.errors import CheckpointError
from megatron_core.terminal import parse_flags
from megatron_core.training.compatibility import open_model
from tests.checkpoint.runs import start

MODEL = {"num_layers": 1}


@pytest.mark.parametrize("load", ["mistyped", "empty", "empty/iter_0000003", "s3-like/run"])
@pytest.mark.parametrize("save", [None, "saved"])
def test_another_folder_without_a_checkpoint_is_an_error(load: str, save: str | None, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    saves = {} if save is None else {"save": str(tmp_path / save)}
    lack = "holds no checkpoint" if load == "empty" else "does not exist"
    with pytest.raises(CheckpointError, match=rf"load='.*{load}' {lack}; give a folder") as error:
        start(MODEL | saves | {"load": str(tmp_path / load)})
    assert str(error.value).endswith("for a job that is restarted")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("save", ["run", "run/", "./run", "other/../run", "link"])
def test_the_folder_of_save_may_be_new(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any of its names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("run")
    run = start(MODEL | {"load": "run", "save": save})
    assert run.state.iteration == 0 and not run.loaded


def deepspeed(folder: Path) -> None:
    (folder / "global_step2").mkdir(parents=True)
    (folder / "global_step2" / "mp_rank_00_model_states.pt").write_bytes(b"weights")
    (folder / "latest").write_text("global_step2")


def hugging_face(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({}, folder / "model.safetensors")


def adapters(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")


OTHERS = {
    "DeepSpeed": (deepspeed, "deepspeed", "--load-hf"),
    "Hugging Face": (hugging_face, "hf", "--load-hf"),
    "PEFT": (adapters, None, "--lora-load"),
}


@pytest.mark.parametrize("further", [{}, {"finetune": True}, {"ckpt_step": 2}, {"save": "same"}], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_format_is_named_with_its_command(
    name: str, further: dict[str, object], tmp_path: Path
) -> None:
    """Also if it is the folder of --save, where a run from scratch would write next to it."""
    make, source, flag = OTHERS[name]
    folder = tmp_path / "a folder"
    make(folder)
    further = further | ({"save": str(folder)} if "save" in further else {})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=name) as error:
        start(MODEL | {"load": str(folder)} | further)
    check_command(str(error.value), folder, source, flag)
    assert sorted(tmp_path.rglob("*")) == before
    if name == "DeepSpeed":
        with pytest.raises(CheckpointError, match="is a checkpoint of DeepSpeed; run megatron-convert"):
            open_model(str(folder))


def check_command(message: str, folder: Path, source: str | None, flag: str) -> None:
    """The command in the message parses, reads the folder, and writes the folder that the flag names."""
    assert message.startswith(f"load={str(folder)!r} ")
    if source is None:
        assert f"{flag} {shlex.quote(str(folder))}" in message
        return
    command = re.search(r"megatron-convert (.*?), then give (--[a-z-]+) (.*?)(?: \(|$)", message)
    assert command is not None
    settings = parse_flags(ConvertFlags, args=shlex.split(command[1]))
    assert (settings.source, settings.load) == (source, str(folder))
    assert settings.save == shlex.split(command[3])[0] and command[2] in ("--load", "--load-hf")
    assert flag in message
