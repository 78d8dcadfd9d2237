"""Weights in pytorch_model.bin are those of safetensors, and no code that the file names is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face.files import PICKLED, PICKLED_INDEX, TensorFiles
from tests.hub.hf_models import save_model


def pickle_weights(folder: Path, files: int = 1, **options: bool) -> None:
    """Replace a folder's safetensors by files of ``torch.save``."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [PICKLED] if files == 1 else [f"pytorch_model-{n:05d}-of-{files:05d}.bin" for n in range(1, files + 1)]
    parts = {file: {key: weights[key] for key in list(weights)[n::files]} for n, file in enumerate(names)}
    for file, part in parts.items():
        torch.save(part, folder / file, **options)
    if files > 1:
        where = {key: file for file, part in parts.items() for key in part}
        (folder / PICKLED_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize(
    ("name", "files", "options"),
    [("gpt2", 1, {}), ("olmoe", 2, {}), ("gpt_neox", 1, {"_use_new_zipfile_serialization": False})],
    ids=["one file", "two files", "before torch 1.6"],
)
def test_pickled_weights_are_read(name: str, files: int, options: dict[str, bool], tmp_path: Path) -> None:
    save_model(name, tmp_path / "theirs")
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    pickle_weights(tmp_path / "theirs", files, **options)
    assert import_hugging_face(tmp_path / "theirs", tmp_path / "ours") < 2e-6
    export_hugging_face(tmp_path / "ours", tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_no_code_is_run(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "attack": Attack(tmp_path / "run")}, tmp_path / PICKLED)
    with pytest.raises(CheckpointError, match="names the Python object"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "run").exists()


def test_other_contents_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / PICKLED)
    with pytest.raises(CheckpointError, match="must contain tensors by name"):
        TensorFiles(tmp_path)
    (tmp_path / PICKLED).write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFiles(tmp_path)
