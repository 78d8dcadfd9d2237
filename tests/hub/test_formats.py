"""Formats of folders: of Megatron-LM opened in place, next to a checkpoint of this program, in object storage."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from megatron_core.checkpoint import CheckpointReader, find_checkpoint, parameter_pieces
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import import_megatron
from megatron_core.locations import location
from megatron_core.models import GPTModel
from megatron_core.training.compatibility import open_model
from tests.hub.test_megatron_checkpoints import imported
from tests.hub.test_real_megatron_checkpoints import unpack
from tests.runs import tiny_run


@pytest.mark.parametrize("name", ["gpt", "llama_tp2_rank_files"])
@pytest.mark.parametrize("step", [None, 3])
def test_a_folder_of_megatron_is_opened_in_place(name: str, step: int | None, tmp_path: Path) -> None:
    """Generation and teachers read the weights that a conversion would write."""
    theirs = unpack(name, tmp_path)
    import_megatron(theirs, tmp_path / "ours", optimizer=False)
    converted = imported(tmp_path / "ours")
    reader, config = open_model(str(theirs), step)
    with reader:
        assert reader.state["iteration"] == 0
        model = GPTModel(config.model, reader.state["vocab_size"], config.max_positions).eval()
        reader.fill(parameter_pieces(model.named_global_parameters()))
    ids = torch.arange(12).view(1, -1)
    with torch.no_grad():
        assert torch.equal(model(ids), converted(ids))
    with pytest.raises(CheckpointError, match="iter_0000009"):
        open_model(str(theirs), 9)


def test_checkpoints_come_before_the_hugging_face_model_of_their_folder(tmp_path: Path) -> None:
    """As with --load: a run that saves into the folder of the model from which it started has trained weights there."""
    run = tiny_run(save=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    run.state.iteration = 2
    run.saver.save(run.state)
    reader, config = open_model(str(tmp_path))
    with reader:
        assert isinstance(reader, CheckpointReader) and reader.folder == tmp_path / "iter_0000002"
        assert config.model == run.config.model


def test_a_folder_of_megatron_in_object_storage_names_the_command() -> None:
    save = f"memory://bucket/{uuid.uuid4().hex}"
    (location(save) / "iter_0000003" / ".metadata").write_bytes(b"metadata")
    for load in (save, f"{save}/iter_0000003"):
        with pytest.raises(CheckpointError, match=f"load={load} is a checkpoint of Megatron-LM; run megatron-convert"):
            find_checkpoint(load)
