"""Checkpoints written by Megatron-LM itself: import, and the losses that Megatron-LM computed afterwards."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
import tarfile
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.checkpoint import find_checkpoint
from megatron_core.config.cli import parse_run_config
from megatron_core.datasets.base import Sample
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import import_megatron
from megatron_core.hub.megatron_lm import MegatronReader
from megatron_core.hub.megatron_lm.pickles import load_metadata
from megatron_core.training.compatibility import check_same_model, stored_config
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import start, train
from tests.hub.megatron_0_20.make_files import COMMON
from tests.hub.test_megatron_checkpoints import imported

DATA = Path(__file__).parent / "megatron_0_20"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))


def unpack(name: str, folder: Path) -> Path:
    """The folder of a stored checkpoint."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder / "theirs", filter="data")
    return folder / "theirs"


def steps(name: str) -> list[dict[str, Any]]:
    """Tokens and loss of each iteration after the checkpoint."""
    return json.loads((DATA / f"{name}.json").read_text())


def test_files_are_there() -> None:
    assert len(NAMES) >= 2 and {path.name.split(".")[0] for path in DATA.glob("*.tar.xz")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_weights_give_the_loss_of_megatron(name: str, tmp_path: Path) -> None:
    import_megatron(unpack(name, tmp_path), tmp_path / "ours")
    model, first = imported(tmp_path / "ours"), steps(name)[0]
    tokens = torch.tensor(first["tokens"])
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(first["loss"], abs=1e-5)


class Recorded:
    """The tokens used by Megatron-LM, as a data set; four sequences per iteration from 0."""

    sequence_length = 16

    def __init__(self, name: str) -> None:
        self._rows = [row for step in steps(name) for row in step["tokens"]]

    def __getitem__(self, index: int) -> Sample:
        row = np.array(self._rows[index - 12])
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": np.ones(16, np.float32)}


def continued(folder: str, name: str, layout: dict[str, Any]) -> list[float]:
    """The losses of iterations 4 to 6 in ``layout``."""
    stored = stored_config(find_checkpoint(folder))
    flat = stored.flat() | {"load": folder, "mock_data": True, "eval_iters": 0} | layout
    run = start(flat)
    assert (run.state.iteration, run.state.consumed_samples, run.optimizer.steps_taken) == (3, 12, 3)
    run.train_loader = run.loader(Recorded(name))
    return [loss for loss, _ in train(run, 3)]


LLAMA = (
    *("--group-query-attention", "--num-query-groups", "2", "--swiglu", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--untie-embeddings-and-output-weights"),
)
FLAGS = {"gpt": (), "llama_tp2_fully": LLAMA, "llama_tp2_rank_files": LLAMA}
"""Of checkpoints, the flags of the model besides ``COMMON``."""


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_megatron_are_those_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Arguments without effect have other defaults there, such as add_qkv_bias with biases."""
    stored = MegatronReader(unpack(name, tmp_path)).settings
    config = parse_run_config([*COMMON, *FLAGS[name]])
    assert {"add_qkv_bias", "rope_scaling_factor", "kv_lora_rank"} <= stored.keys()
    check_same_model(stored, config)
    with pytest.raises(CheckpointError, match="add_qkv_bias=True, but"):
        check_same_model(
            stored | {"add_qkv_bias": False}, parse_run_config([*COMMON, "--disable-bias-linear", "--add-qkv-bias"])
        )


CONTINUED = NAMES


@pytest.mark.parametrize("name", CONTINUED)
def test_training_continues_with_the_losses_of_megatron(name: str, tmp_path: Path) -> None:
    said = import_megatron(unpack(name, tmp_path), tmp_path / "ours", optimizer=True)
    assert said == "weights and optimizer state of iteration 3"
    losses = continued(str(tmp_path / "ours"), name, {})
    assert losses == pytest.approx([step["loss"] for step in steps(name)], abs=2e-5)


def _continue_on_two_ranks(folder: str, name: str, layout: dict[str, Any]) -> None:
    losses = continued(folder, name, layout)
    assert losses == pytest.approx([step["loss"] for step in steps(name)], abs=2e-5)


@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"use_distributed_optimizer": True}])
def test_training_continues_in_another_layout(layout: dict[str, Any], tmp_path: Path) -> None:
    """Stages of Megatron-LM's pipeline continue as tensor-parallel and as data-parallel ranks."""
    import_megatron(unpack("llama_pp2", tmp_path), tmp_path / "ours", optimizer=True)
    run_ranks(2, _continue_on_two_ranks, str(tmp_path / "ours"), "llama_pp2", layout)


def test_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Without the files of the distributed optimizer: only weights, or an error if the state is required."""
    theirs = unpack("llama_tp2_rank_files", tmp_path)
    for path in theirs.glob("*/*/distrib_optim.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has no optimizer state that can be read.*--no-optimizer"):
        import_megatron(theirs, tmp_path / "ours", optimizer=True)
    said = import_megatron(theirs, tmp_path / "ours")
    assert said == "weights without optimizer state, as iteration 0"


def test_load_names_the_command(tmp_path: Path) -> None:
    theirs = unpack("gpt", tmp_path)
    for folder in (theirs, theirs / "iter_0000003"):
        with pytest.raises(CheckpointError, match="is a checkpoint of Megatron-LM; run megatron-convert") as found:
            find_checkpoint(str(folder))
        command = shlex.split(str(found.value).partition("run ")[2].partition(", then")[0])
        assert command[command.index("--load") + 1] == str(folder) and "--save" in command
    with pytest.raises(CheckpointError, match="--ckpt-step 3,"):
        find_checkpoint(str(theirs), 3)


class Planted:
    """An object whose unpickling creates a folder."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


def test_plans_in_the_metadata_of_release_0_14_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.dist_checkpointing.strategies.torch"
    plan, path = type("MCoreSavePlan", (), {"__module__": name}), unpack("gpt", tmp_path) / "iter_0000003/.metadata"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(MCoreSavePlan=plan))
    metadata = load_metadata(path)
    metadata.planner_data, metadata.all_local_plans = None, [plan()]
    path.write_bytes(pickle.dumps(metadata))
    assert import_megatron(tmp_path / "theirs", tmp_path / "ours", optimizer=True).endswith("state of iteration 3")


def plant(path: Path) -> None:
    metadata = load_metadata(path)
    metadata.planner_data, metadata.all_local_plans = None, [Planted()]
    path.write_bytes(pickle.dumps(metadata))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    path.write_bytes(bytes(each ^ 255 for each in path.read_bytes()))


def replace_by(make: Callable[[Path], object], paths: Iterable[Path]) -> None:
    for path in list(paths):
        path.unlink()
        make(path)


FAULTS: dict[str, tuple[Any, str]] = {
    "truncated metadata": (lambda f: cut(f / ".metadata"), r"\.metadata cannot be read"),
    "metadata of another kind": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps({"state": 1})),
        r"\.metadata cannot be read: .* no attribute",
    ),
    "metadata with a huge length": (
        lambda f: (f / ".metadata").write_bytes(b"\x80\x04\x8e" + b"\xff" * 8),
        r"\.metadata cannot be read",
    ),
    "an object in the plans": (lambda f: plant(f / ".metadata"), r"names? the Python object posix\.mkdir"),
    "a truncated file": (lambda f: [cut(path) for path in f.glob("*.distcp")], "is truncated: .* is incomplete"),
    "a missing file": (lambda f: [path.unlink() for path in f.glob("*.distcp")], "is missing or not a file"),
    "a named pipe": (lambda f: replace_by(os.mkfifo, f.glob("*.distcp")), "is missing or not a file"),
    "a link to itself": (lambda f: replace_by(lambda p: p.symlink_to(p), f.glob("*.distcp")), "is missing or not a"),
    "flipped bytes": (
        lambda f: [flip(path) for path in f.glob("*.distcp")],
        "in .* cannot be read: .*; copy the whole",
    ),
    "a newer format": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'),
        "names the format 'torch_dist' of version 2; torch_dist of version 1 is read",
    ),
    "zarr": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}'),
        "names the format 'zarr'",
    ),
    "a record of the format that is cut": (lambda f: cut(f / "metadata.json"), r"metadata\.json cannot be read"),
    "a long number in the tracker": (
        lambda f: (f.parent / "latest_checkpointed_iteration.txt").write_text("9" * 5000),
        "it must be an iteration or release",
    ),
    "a digit of another script": (
        lambda f: (f.parent / "latest_checkpointed_iteration.txt").write_text("\u00b2"),
        "it must be an iteration or release",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_one_sentence(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, message = FAULTS[fault]
    monkeypatch.chdir(tmp_path)
    theirs = unpack("gpt", tmp_path)
    spoil(theirs / "iter_0000003")
    with pytest.raises(CheckpointError, match=message) as found:
        import_megatron(theirs, tmp_path / "ours")
    assert "\n" not in str(found.value)
    assert find_checkpoint(str(tmp_path / "ours")) is None and not (tmp_path / "ran").exists()
