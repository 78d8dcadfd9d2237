"""Checkpoints written with --ckpt-format: Megatron Core and PyTorch load them; training continues with our losses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.megatron_peer import MEGATRON
from megatron_core.checkpoint import CheckpointReader
from megatron_core.commands.convert_checkpoint import ConvertFlags, convert_checkpoint
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm import settings_of_arguments
from megatron_core.hub.megatron_lm.arguments import training_settings
from megatron_core.hub.megatron_lm.writer import write_checkpoint
from megatron_core.training.compatibility import stored_config
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import start, train
from tests.hub import megatron_training as theirs
from tests.hub.test_continue_megatron import BEFORE, BIASED, DP2, EP2, PP2, SHARDED, TP2, ZERO3, Tokens, continued

installed = pytest.mark.skipif(not MEGATRON.is_dir(), reason="megatron-core is not installed (make install-test)")
AFTER = 4


@dataclass(frozen=True)
class Case:
    """A model, our layout, and the layout and optimizer of Megatron Core that continue on as many ranks."""

    shape: dict[str, Any]
    ours: dict[str, Any]
    layout: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    after: int = AFTER
    """Number of steps that are compared."""


ZERO1 = {"use_distributed_optimizer": True}
BY_SAMPLES = {"train_iters": None, "global_batch_size": None}
CASES = {
    "gpt": Case(theirs.GPT, TP2, "pp2"),
    "gpt, distributed": Case(theirs.GPT, PP2, "", SHARDED),
    "llama": Case(theirs.LLAMA, ZERO1, "tp2", SHARDED),
    "llama bf16": Case(theirs.LLAMA, ZERO1, "tp2", {"bf16": True}),
    "llama bf16, distributed": Case(theirs.LLAMA, DP2, "tp2", SHARDED | {"bf16": True}),
    "experts": Case(theirs.EXPERTS, EP2, "ep2"),
    "experts with biases, distributed": Case(BIASED, PP2, "", SHARDED),
    "quantiles": Case(theirs.QUANTILES, EP2, "ep2"),
    "latent experts": Case(theirs.LATENT_EXPERTS, EP2, "ep2"),
    "experts, mtp": Case(theirs.AHEAD_OF_EXPERTS, EP2, "ep2"),
    "a dense layer, experts, mtp": Case(theirs.DENSE_FIRST, PP2, ""),
    "mla": Case(theirs.MLA, TP2, "", SHARDED),
    "sparse attention": Case(theirs.SPARSE, TP2 | {"sequence_parallel": True}, "pp2", SHARDED),
    "layers of different sizes": Case(theirs.HETEROGENEOUS, PP2, "tp2", SHARDED),
    "mtp": Case(theirs.MTP, PP2, "tp2", SHARDED),
    "mtp by one layer": Case(theirs.REPEATED, PP2, "tp2", SHARDED),
    "a batch that grows": Case(theirs.GROWING_BATCH, TP2 | BY_SAMPLES, "pp2", SHARDED, after=7),
    "llama on 4 ranks": Case(theirs.LLAMA, TP2 | PP2, "tp2", SHARDED, 4, 7),
    "gpt on 4 ranks": Case(theirs.GPT, TP2 | ZERO3, "tp2 pp2", {}, 4, 7),
    "experts on 4 ranks": Case(theirs.EXPERTS, EP2 | PP2, "pp2 ep2", SHARDED, 4, 7),
}


def flat_settings(case: Case) -> dict[str, Any]:
    """The settings of our run."""
    named = vars(theirs.arguments_of(case.shape, {}, bf16=case.settings.get("bf16", False)))
    return settings_of_arguments(named) | training_settings(named) | {"fp64": False, "mock_data": True} | case.ours


def _train(folder: Path, name: str) -> None:
    """Train, save in both formats, and record the next losses."""
    saved = {"save": str(folder / name), "ckpt_format": "torch_dist", "ckpt_format_interval": 3}
    run = start(flat_settings(CASES[name]) | saved | {"eval_iters": 0})
    run.train_loader = run.loader(Tokens())
    for steps in (2, 1):
        train(run, steps)
        run.saver.save(run.state)
    run.saver.close()
    losses = [loss for loss, _ in train(run, CASES[name].after)]
    (folder / name / "losses.json").write_text(json.dumps(losses))


def _continue(folder: Path, names: list[str]) -> None:
    """Load in Megatron Core, and record the next losses."""
    for name in names:
        case = CASES[name]
        training = theirs.Training(case.shape, case.layout, **case.settings)
        training.load(folder / name / "torch_dist" / f"iter_{BEFORE:07d}")
        consumed = BEFORE * case.shape.get("global_batch_size", theirs.BATCH)
        assert (training.iteration, training.args.consumed_train_samples) == (BEFORE, consumed)
        losses = [training.step() for _ in range(case.after)]
        (folder / name / "theirs.json").write_text(json.dumps(losses))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the cases in this run of the tests, continued by Megatron Core if it is installed."""
    made = tmp_path_factory.mktemp("formats")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    names = {item.callspec.params["name"] for item in tests if hasattr(item, "callspec")} | {READ_AGAIN}
    for name in names:
        run_ranks(CASES[name].ranks, _train, made, name)
    if MEGATRON.is_dir():
        by_ranks = {ranks: sorted(name for name in names if CASES[name].ranks == ranks) for ranks in (2, 4)}
        calls = {ranks: (_continue, made, of_ranks) for ranks, of_ranks in by_ranks.items() if of_ranks}
        theirs.ranks_of_megatron(theirs.load_megatron, calls)
    return made


READ_AGAIN = "llama"


@installed
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", CASES)
def test_megatron_continues_with_our_losses(name: str, folder: Path) -> None:
    ours, found = (json.loads((folder / name / f"{each}.json").read_text()) for each in ("losses", "theirs"))
    assert found == pytest.approx(ours, abs=2e-3 if CASES[name].settings.get("bf16") else 5e-6)


def test_the_format_has_its_own_interval(folder: Path) -> None:
    root = folder / READ_AGAIN
    assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    there = sorted(path.name for path in (root / "torch_dist").iterdir())
    assert there == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    assert (root / "torch_dist" / there[1]).read_text() == "3"


def test_it_continues_here(folder: Path) -> None:
    """A run of this framework continues from the second format, in another layout."""
    losses = run_ranks(2, continued, str(folder / READ_AGAIN / "torch_dist"), flat_settings(CASES[READ_AGAIN]) | TP2)[0]
    assert losses == pytest.approx(json.loads((folder / READ_AGAIN / "losses.json").read_text()), abs=5e-6)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_loads_every_tensor(folder: Path, tmp_path: Path) -> None:
    said = convert_checkpoint(
        ConvertFlags(source="native", to="torch_dcp", load=str(folder / READ_AGAIN), save=str(tmp_path))
    )
    assert said.endswith("iteration 3 as torch_dcp")
    with CheckpointReader(folder / READ_AGAIN / "iter_0000003") as reader:
        expected = {name: reader.read(name) for name in reader.manifest.tensors}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "iter_0000003")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    dcp_to_torch_save(tmp_path / "iter_0000003", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    name = "decoder.final_layernorm.weight"
    assert torch.equal(whole["optimizer"]["exp_avg"][name], expected[f"optimizer.exp_avg.{name}"])
    assert whole["state"]["consumed_samples"] == BEFORE * theirs.BATCH


def test_other_folders_are_not_replaced(folder: Path, tmp_path: Path) -> None:
    note = tmp_path / "iter_0000003" / "notes.txt"
    note.parent.mkdir()
    note.write_text("the user's notes")
    with pytest.raises(CheckpointError, match=r"--save .* is not empty; give another folder"):
        convert_checkpoint(
            ConvertFlags(source="native", to="megatron", load=str(folder / READ_AGAIN), save=str(tmp_path))
        )
    with CheckpointReader(folder / READ_AGAIN / "iter_0000003") as reader:
        model = stored_config(reader.folder).model
        with pytest.raises(CheckpointError, match="iter_0000003 exists and was not written by this program"):
            write_checkpoint(reader, model, tmp_path, "torch_dist")
    assert note.read_text() == "the user's notes"


def test_recurrences_that_megatron_lacks_are_refused(tmp_path: Path) -> None:
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    kimi = {"experimental_attention_variant": "kimi_delta_attention", "linear_attention_freq": (2,)}
    run = start(kimi | sizes | {"save": str(tmp_path)})
    run.saver.save(run.state)
    run.saver.close()
    with pytest.raises(CheckpointError, match="cannot be written as torch_dist"):
        convert_checkpoint(ConvertFlags(source="native", to="megatron", load=str(tmp_path), save=str(tmp_path / "out")))


def test_models_that_megatron_lm_cannot_train_are_refused(tmp_path: Path) -> None:
    run = start({"parallel_residual": True, "softmax_scale": 0.25, "save": str(tmp_path)})
    run.saver.save(run.state)
    run.saver.close()
    with pytest.raises(CheckpointError, match=r"parallel_residual=True, softmax_scale=0\.25, which Megatron-LM has no"):
        convert_checkpoint(ConvertFlags(source="native", to="megatron", load=str(tmp_path), save=str(tmp_path / "out")))
