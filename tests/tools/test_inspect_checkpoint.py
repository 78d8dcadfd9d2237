"""Output of the inspection of a checkpoint, and the comparison of two checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_core.checkpoint import Box, Save, TensorBox, save_checkpoint
from megatron_core.commands.inspect_checkpoint import InspectCheckpointFlags, inspect_checkpoint
from megatron_core.errors import CheckpointError
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import save_run, start, train
from tests.programs import run_program

ONE_LAYER = {"num_layers": 1}


run = partial(run_program, "tools/inspect_checkpoint.py")


def write(root: Path, iteration: int = 1, **tensors: torch.Tensor) -> Path:
    """A checkpoint of whole tensors."""
    pieces = [
        TensorBox(name.replace("_", "."), tuple(t.shape), Box((0,) * t.dim(), tuple(t.shape)), t, owned=True)
        for name, t in tensors.items()
    ]
    return save_checkpoint(Save(root, iteration, {"consumed_samples": 8}), pieces, lambda ok: ok)


def shown(capsys: pytest.CaptureFixture[str], **settings: object) -> tuple[bool, str]:
    """Whether the compared checkpoints are equal, and the tool's output."""
    equal = inspect_checkpoint(InspectCheckpointFlags(**settings))
    return equal, capsys.readouterr().out


def test_contents_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(ONE_LAYER | {"save": str(tmp_path)})
    train(run, 2)
    folder = save_run(run)
    elements = sum(p.numel() for p in run.stages[0].parameters()) - 3 * 16  # rows that pad the vocabulary
    _, out = shown(capsys, checkpoint=str(tmp_path), verify=True, tensors=True)
    lines = [line.split() for line in out.splitlines()]
    assert f"{folder}: no fault; all 1 files" in out
    assert "  data       consumed_samples 8, consumed_tokens 64" in out
    assert f"layout     {run.layout}, 1 files of ranks" in out
    assert "model      num_layers 1, hidden_size 16, num_attention_heads 4, seq_length 8, vocabulary 101" in out
    kinds = {line[0]: line[2:] for line in lines if line and line[-1] == "F64"}
    assert kinds.keys() == {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"}
    assert all(found == [f"{elements:,}", f"{8 * elements:,}", "F64"] for found in kinds.values())
    size = (folder / "rank_00000.safetensors").stat().st_size
    assert ["rank_00000.safetensors", f"{size:,}"] in lines
    assert "model.decoder.final_layernorm.weight  F64 [16]  rank_00000.safetensors" in out


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, w=torch.ones(64)) / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run(tmp_path, "--verify")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"inspect_checkpoint: {file} is damaged: its hash differs\n"
    assert inspect_checkpoint(InspectCheckpointFlags(checkpoint=str(tmp_path))), "without --verify the data is not read"


def test_two_checkpoints_tensor_by_tensor(tmp_path: Path) -> None:
    same = torch.tensor([float("nan"), -0.0, 1.0])
    mine = {"a": same, "b": torch.zeros(4), "c": torch.ones(2, 3), "d": torch.ones(3), "e": torch.tensor(0.0)}
    theirs = {"a": same, "b": torch.tensor([0.0, 0.5, 0.0, -0.25]), "c": torch.ones(3, 2), "e": torch.tensor(-0.0)}
    theirs["f"] = torch.ones(1, dtype=torch.bfloat16)
    one, other = write(tmp_path / "one", 1, **mine), write(tmp_path / "other", 1, **theirs)
    done = run(tmp_path / "one", "--diff", tmp_path / "other")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines() == [
        f"- {one}",
        f"+ {other}",
        "- d",
        "+ f",
        "  b: 2 of 4 elements, by up to 5.000e-01; the largest is 0.000e+00",
        "  c: F32 [2, 3] and F32 [3, 2]",
        "  e: 1 of 1 elements, by up to 0.000e+00; the largest is 0.000e+00",
        "1 tensors are bitwise equal, 3 differ, 2 are in only one of them",
    ]
    assert inspect_checkpoint(InspectCheckpointFlags(checkpoint=str(one), diff=str(one)))


def _save_split(root: Path) -> None:
    save_run(start(ONE_LAYER | {"save": str(root), "tensor_model_parallel_size": 2, "use_distributed_optimizer": True}))


def test_layouts_of_the_same_weights_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Initial weights do not depend on the layout; only the layout and its settings differ."""
    save_run(start(ONE_LAYER | {"save": str(tmp_path / "one")}))
    run_ranks(2, _save_split, tmp_path / "split")
    equal, out = shown(capsys, checkpoint=str(tmp_path / "one"), diff=str(tmp_path / "split"), verify=True)
    assert equal and "0 differ, 0 are in only one of them" in out
    assert "  tensor_model_parallel_size: 1 and 2\n" in out
    other = start(ONE_LAYER | {"save": str(tmp_path / "other"), "seed": 5})
    save_run(other)
    equal, out = shown(capsys, checkpoint=str(tmp_path / "one"), diff=str(tmp_path / "other"))
    assert not equal and "  seed: 1234 and 5\n" in out and "word_embeddings.weight: 1,616 of 1,616 elements" in out


def test_long_lists_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {f"w{i:03d}": torch.ones(1) for i in range(60)}
    write(tmp_path / "one", **tensors)
    write(tmp_path / "other", **{name: 2 * tensor for name, tensor in tensors.items()})
    settings = {"checkpoint": str(tmp_path / "one"), "diff": str(tmp_path / "other")}
    assert "... and 10 more; --tensors lists them" in shown(capsys, **settings)[1]
    assert "w059" in shown(capsys, **settings, tensors=True)[1]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("nowhere",), "nowhere has no checkpoint; give a --save folder of a training run"),
        (
            ("there", "--ckpt-step", 9),
            "there/iter_0000009 is not a complete checkpoint; complete ones in there: iter_0000001",
        ),
        (("there", "--diff", "nowhere"), "nowhere has no checkpoint"),
    ],
)
def test_errors_are_one_sentence(
    flags: tuple[object, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "there", w=torch.ones(1))
    names = {"--ckpt-step": "ckpt_step", "--diff": "diff"}
    with pytest.raises(CheckpointError, match=told):
        inspect_checkpoint(
            InspectCheckpointFlags(checkpoint=flags[0], **({names[flags[1]]: flags[2]} if len(flags) > 1 else {}))
        )
