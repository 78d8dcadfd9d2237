"""A copy made during the next step is bitwise equal to the state before the step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest

from megatron_core import parallel_state
from megatron_core.checkpoint.folder import complete_iterations
from megatron_core.errors import CheckpointError
from megatron_core.features.background_saves import snapshot
from megatron_core.resilience.faults import Faults
from megatron_core.training.saving import make_saver
from megatron_core.training.setup import Run
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import save_run, start, train
from tests.defects.plant import planted

# Contents of checkpoints in addition to AdamW's weights and moments in memory.
KINDS: dict[str, dict[str, Any]] = {
    "zero 1": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "zero 3 on disk, fp16": {
        "zero3_param_offload_dir": "here",
        "optimizer_offload_dir": "here",
        "zero_stage": 3,
        "fp64": False,
        "fp16": True,
    },
    "state in the host's memory": {"optimizer_cpu_offload": True, "fp64": False, "bf16": True, "zero_stage": 3},
    "state on disk, muon": {"optimizer_offload_dir": "here", "optimizer": "muon", "use_distributed_optimizer": True},
    "experts": {
        "num_experts": 4,
        "disable_bias_linear": True,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "expert_model_parallel_size": 2,
    },
    "compressed": {"grad_compression": "powersgd", "powersgd_rank": 1, "grad_compression_warmup_iters": 1},
    "fp8": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp64": False, "bf16": True},
}


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def _started(folder: Path, settings: dict[str, Any]) -> Run:
    """A run after two steps, saved at once."""
    settings = {name: str(folder) if name.endswith("_dir") else value for name, value in settings.items()}
    run = start({"num_layers": 2, "save": str(folder / "sync")} | settings)
    train(run, 2)
    save_run(run)
    return run


@contextmanager
def _saving_late(run: Run, folder: Path, most_seconds: float = 0.0) -> Iterator[None]:
    """The same state saved in the background, with a copy that starts as late as possible: when something waits for it.

    It takes up to ``most_seconds`` seconds, and ends earlier if the update waits for it.
    """
    begin, left, copy = Event(), Event(), snapshot._copy

    def late(*pieces: object) -> None:
        if current_thread() is not main_thread():
            assert begin.wait(60)
            left.wait(most_seconds)
        copy(*pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_copy", late)
        into = replace(run.config.checkpoint, save=str(folder / "async"), async_save=True)
        config = replace(run.config, checkpoint=into)
        saver = make_saver(
            config, run.data_parallel, run.optimizer, vocab_size=run.vocab_size, tokenizer=None, parts=run.parts
        )
        saver.save(run.state)
        wait = run.optimizer.before_update
        patch.setattr(run.optimizer, "before_update", lambda: (begin.set(), wait()))
        yield
        left.set()
        begin.set()
        saver.finish()


def _content(folder: Path) -> dict[str, str]:
    """Hashes of a checkpoint's files, without the save's id, and of the manifest's entries of tensors.

    Hashes, because pytest explains differences of values, which takes hours for megabytes.
    """
    manifest = json.loads((folder / "iter_0000002" / "manifest.json").read_text())
    state = {name: value for name, value in manifest["state"].items() if name != "config"}
    found = {name: json.dumps(value).encode() for name, value in {"tensors": manifest["tensors"], **state}.items()}
    for path in folder.glob("*/rank_*.safetensors"):
        found[path.name] = path.read_bytes().replace(manifest["save_id"].encode(), b"")
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


def _save_both_ways(root: Path, kinds: list[str], most_seconds: float) -> None:
    for kind in kinds:
        run = _started(root / kind, KINDS[kind])
        with _saving_late(run, root / kind, most_seconds):
            train(run, 1)


def _check(root: Path, kinds: list[str], most_seconds: float = 0.0) -> None:
    run_ranks(2, _save_both_ways, root, kinds, most_seconds)
    for kind in kinds:
        assert _content(root / kind / "sync") == _content(root / kind / "async"), kind


def test_a_late_copy_is_of_the_step_that_asked_for_it(tmp_path: Path) -> None:  # C44
    _check(tmp_path, list(KINDS))


@pytest.mark.parametrize(
    ("target", "old", "new", "kind"),
    [
        ("optimizer.sharded:Optimizer.step", "self.before_update()", "pass", "zero 1"),
        ("features.background_saves.saver:BackgroundSaver._wait_until_copied", "self._copied.wait()", "pass", "zero 1"),
    ],
    ids=["the update does not wait", "the wait is none"],
)
def test_a_late_copy_of_what_has_changed_is_noticed(target: str, old: str, new: str, kind: str, tmp_path: Path) -> None:
    with planted(target, old, new), pytest.raises(AssertionError, match=kind):
        _check(tmp_path, [kind], most_seconds=5.0 * ("_copied" in old))


@pytest.mark.parametrize("waits", [True, False])
def test_a_fault_on_purpose_waits_for_the_copy(tmp_path: Path, waits: bool) -> None:
    run = _started(tmp_path, {"inject_fault": ["nan@0:3"]})
    with _saving_late(run, tmp_path):
        if not waits:
            run.optimizer.before_update = lambda: None
        Faults(run).before_step()
    assert (_content(tmp_path / "sync") == _content(tmp_path / "async")) == waits


def _without_memory(root: Path) -> None:
    """On one rank the copy fails in its thread: an error on both ranks, no hang, and the next save is complete."""
    run = start({"num_layers": 1, "save": str(root), "async_save": True, "use_distributed_optimizer": True})
    train(run, 1)
    copy = snapshot._copy

    def fail(*pieces: object) -> None:
        if current_thread() is not main_thread():
            raise RuntimeError("not enough memory")
        copy(*pieces)

    snapshot._copy = fail if run.groups.rank == 1 else copy
    run.saver.save(run.state)
    train(run, 1)
    with pytest.raises(CheckpointError, match=r"not enough memory|see the message of that rank"):
        run.saver.finish()
    snapshot._copy = copy
    save_run(run)
    run.saver.finish()


def test_a_copy_that_fails_is_told_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _without_memory, tmp_path)
    assert complete_iterations(tmp_path) == [2] and not list(tmp_path.glob(".iter_*"))
